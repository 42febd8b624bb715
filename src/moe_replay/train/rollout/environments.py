"""Environments: async functions that answer a completion and let the model continue, for rollouts of several turns.

    async def environment(episode):                      # rollout.environment = "module:environment"
        while episode.can_continue and (call := read_call(episode.completion)):
            episode.observe(answer(call))                # tokens without loss and without made-up routes
            await episode.generate()

An environment is called once per episode, after the first turn. One that condenses or edits its history calls `rewrite`
with the whole next prompt in place of `observe`; from there on the episode is another sample.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from moe_replay.engines.base import Sampler
from moe_replay.engines.event_loop import LoopThread
from moe_replay.engines.session import Session, TurnSampler
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.records import FinishReason, Sample, SamplingParams, Trajectory
from moe_replay.train.config.registries import ENVIRONMENTS
from moe_replay.train.rollout.prompts import Prompt, template_errors
from moe_replay.train.rollout.tools import ToolCall, ToolSet
from moe_replay.utils.misc import one_line
from moe_replay.utils.plugins import resolve, user_code


class EpisodeError(MoeReplayError):
    """An environment that raised, took too long, or requested more turns than are allowed."""

    exit_status = ExitStatus.FAILED


@dataclass(slots=True, kw_only=True)
class Episode:
    """One answer to a prompt, turn by turn: one sample, or several where the history is rewritten.

    session      the sample that is growing
    params       sampling parameters of each turn, n = 1
    max_length   maximum number of tokens in a sample
    max_turns    maximum number of completions, the first included
    turns        turns started so far
    tools        functions of rollout.tools; None if there are none
    earlier      samples that ended where the history was rewritten
    """

    prompt: Prompt
    session: Session
    engine: TurnSampler
    params: SamplingParams
    tokenizer: Any
    max_length: int
    max_turns: int = 1
    turns: int = 1
    tools: ToolSet | None = None
    earlier: list[Trajectory] = field(default_factory=list)

    def __str__(self) -> str:
        return f"turn {self.turns}, {len(self.session)} tokens"

    async def start(self, sample: Sample) -> FinishReason:
        """Add the first turn; if a weight update aborted it, sample the rest of it."""
        self.session.absorb(sample)
        return await self._finish_turn()

    @property
    def completion(self) -> str:
        """Text of the last turn, without special tokens."""
        return self.tokenizer.decode(self.session.token_ids[self.session.turn_starts_at :], skip_special_tokens=True)

    @property
    def raw_completion(self) -> str:
        """Text of the last turn, special tokens included."""
        return self.tokenizer.decode(self.session.token_ids[self.session.turn_starts_at :], skip_special_tokens=False)

    @property
    def can_continue(self) -> bool:
        """Whether `max_turns` and `max_length` allow another turn; `observe` always leaves room for one token."""
        return self.turns < self.max_turns and len(self.session) < self.max_length

    def observe(self, text: str) -> None:
        """Append text that the model did not generate: a tool's output or the next user message, template included."""
        self.session.observe(self._ids(text)[: max(0, self.max_length - 1 - len(self.session))])

    def fits(self, text: str) -> bool:
        """Whether `observe` would not have to truncate the text."""
        return len(self.session) + len(self._ids(text)) < self.max_length

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # ---- rewriting the history ----------------------------------------------------------------------------------

    @property
    def can_rewrite(self) -> bool:
        """Whether `max_turns` allows another turn, for which `rewrite` may make room."""
        return self.turns < self.max_turns

    def rewrite(self, prompt: str | Sequence[int]) -> None:
        """Set the whole prompt of the next turn, as text or token ids, in place of the history so far.

        Where it continues the sequence token by token, it is an observation. Otherwise the sequence so far stays as it
        is, a sample that is trained on, and another sample begins.
        """
        ids = self._ids(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not self.fits_prompt(ids):
            raise EpisodeError(
                "a rewritten prompt must have a token and leave room for one",
                sample=f"row {self.prompt.row}",
                expected=f"1 to {self.max_length - 1} tokens",
                found=f"{len(ids)} tokens after turn {self.turns}",
                remedy="Condense further; episode.fits_prompt(prompt) says whether it fits. rollout.max_length has the "
                "limit",
            )
        so_far = self.session.token_ids.tolist()
        if ids[: len(so_far)] == so_far:
            self.session.observe(ids[len(so_far) :])
        else:
            self.begin_sample(ids)

    def fits_prompt(self, prompt: str | Sequence[int]) -> bool:
        """Return whether `rewrite` accepts this prompt."""
        return 0 < len(self._ids(prompt) if isinstance(prompt, str) else prompt) < self.max_length

    def begin_sample(self, prompt_ids: Sequence[int]) -> None:
        """Begin another sample with this prompt, also where it continues the sequence; `rewrite` is the usual way."""
        self.earlier += self._finished()
        if self.params.seed is not None:  # equal prompts of one episode have different samples
            entropy = np.random.SeedSequence([self.params.seed, len(self.earlier), self.turns])
            self.params = replace(self.params, seed=int(entropy.generate_state(1)[0] >> 1))
        self.session = Session(prompt_ids, self.session.keep)

    def finish(self) -> list[Trajectory]:
        """Return the samples of the episode, in order."""
        return [*self.earlier, *self._finished()]

    def _finished(self) -> list[Trajectory]:
        """Return the growing sample, unless no turn followed its prompt."""
        return [] if self.session.finish_reason is None else [self.session.finish()]

    async def generate(self) -> FinishReason:
        if not self.can_continue:
            raise EpisodeError(
                "no further turn is allowed",
                sample=f"row {self.prompt.row}",
                expected=f"at most {self.max_turns} turns and {self.max_length} tokens",
                found=f"{self.turns} turns and {len(self.session)} tokens so far",
                remedy="Check episode.can_continue before episode.generate()",
            )
        self.turns += 1
        await self.session.generate(self.engine, self.params)
        return await self._finish_turn()

    async def _finish_turn(self) -> FinishReason:
        reason = self.session.finish_reason
        while reason is FinishReason.ABORT:  # a weight update: the new weights sample the rest of the turn
            reason = await self.session.generate(self.engine, self.params)
        assert reason is not None
        return reason


Environment = Callable[[Episode], Awaitable[None]]


def load_environment(name: str | None) -> Environment | None:
    """Return the environment that `rollout.environment` names; None for rollouts of a single turn."""
    if name is None:
        return None
    return resolve(name, ENVIRONMENTS, kind="environment", key="rollout.environment")


async def run_environment(environment: Environment, episode: Episode, timeout_s: float = math.inf) -> None:
    """Run an environment on one episode, for `timeout_s` at most.

    Errors name the environment, the row of the data set and the turn.
    """
    name, row = environment_name(environment), f"row {episode.prompt.row}"
    task = asyncio.ensure_future(_run(environment, episode, name, row))
    try:
        await asyncio.wait({task}, timeout=None if timeout_s == math.inf else timeout_s)
        if not task.done():
            raise EpisodeError(
                f"environment {name} did not return within {timeout_s:g} s",
                sample=row,
                found=episode,
                remedy="Give up earlier in the function, or raise rollout.environment_timeout_s",
            )
        task.result()
    finally:
        task.cancel()


async def _run(environment: Environment, episode: Episode, name: str, row: str) -> None:
    with user_code(f"environment {name}", EpisodeError, sample=row, found=episode):
        await environment(episode)


def environment_name(environment: Environment) -> str:
    return getattr(environment, "__qualname__", repr(environment))


# ---- event loops for environments ------------------------------------------------------------------------------------


T = TypeVar("T")


class EnvironmentLoops:
    """Threads with an event loop each; episodes go to them round-robin."""

    def __init__(self, count: int) -> None:
        self._loops = [LoopThread(f"environments {number}") for number in range(count)]
        self._turns = itertools.cycle(self._loops)
        self._asked = [(loop.ping(), time.monotonic()) for loop in self._loops]

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the next loop and await it in the caller's; it is cancelled with the caller."""
        return await next(self._turns).run_async(coroutine)

    def blocked_s(self) -> float:
        """Return for how long a loop has not answered, at most as long as this is called; 0 if all are free."""
        now, longest = time.monotonic(), 0.0
        for place, (answered, since) in enumerate(self._asked):
            if answered.is_set():
                self._asked[place] = (self._loops[place].ping(), now)
            else:
                longest = max(longest, now - since)
        return longest

    def close(self) -> None:
        """End the loops and what runs in them; one that is blocked is left behind."""
        for loop in self._loops:
            loop.close()


class LoopBoundSampler:
    """Has an engine sample in its own event loop, whichever loop the caller runs in."""

    def __init__(self, engine: Sampler, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        call = self._engine.generate_one(prompt, params)
        if asyncio.get_running_loop() is self._loop:
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))


# ---- the environment for tool calls ----------------------------------------------------------------------------------


_COMPLETION = "MOE-REPLAY-COMPLETION"  # placeholder for what the model said


async def answer_tool_calls(episode: Episode) -> None:
    """Functions of rollout.tools answer the calls in a completion; the chat template writes their results."""
    tools = episode.tools
    if tools is None:
        raise EpisodeError("there are no tools", expected="functions in rollout.tools")
    while episode.can_continue and episode.session.finish_reason is FinishReason.STOP:
        calls = tools.parse(episode.raw_completion)
        if not calls:
            return
        text = tool_messages(episode, calls, await tools.answer(calls))
        if not episode.fits(text):
            return
        episode.observe(text)
        await episode.generate()


def tool_messages(episode: Episode, calls: Sequence[ToolCall], results: Sequence[str]) -> str:
    """Return what the chat template writes between a completion and the next one, for these results."""
    tokenizer = episode.tokenizer
    conversation = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _COMPLETION},
        *(
            {"role": "tool", "name": call.name, "content": _harmless(result, tokenizer)}
            for call, result in zip(calls, results, strict=True)
        ),
    ]
    try:
        text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    except (ValueError, TypeError, LookupError, AttributeError, *template_errors()) as error:
        raise _unusable(one_line(error)) from error
    _, separator, after = str(text).partition(_COMPLETION)
    if not separator:
        raise _unusable("the answer of the assistant is not in what it writes")
    # The model has sampled the token that ends its turn, which the template writes too.
    return after.removeprefix(tokenizer.decode(episode.session.token_ids[-1:], skip_special_tokens=False))


def _harmless(text: str, tokenizer: Any) -> str:
    """Return text in which no special token can be read: the result of a tool must not begin another turn."""
    for token in {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        text = text.replace(token, f"{token[:1]} {token[1:]}")
    return text


def _unusable(why: str) -> EpisodeError:
    return EpisodeError(
        f"the chat template does not accept tool results: {why}",
        expected="messages of the role 'tool' after one of the assistant",
        remedy="Write an environment that observes the results in the model's own format (docs/environments.md)",
    )
