"""`Episode`: one trajectory on its way, and what an environment of several turns may do with it.

    async def environment(episode):                      # rollout.environment = "module:environment"
        while (call := read_call(episode.completion)) and episode.may_go_on:
            episode.observe(answer(call))                # tokens without loss and without made-up routes
            await episode.generate()

It is called when the first turn has ended. Tokens that it observes are fed to the model, routed by the engine in the
next turn, and never trained on.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.rollout.engine import Engine
from moe_replay.rollout.session import Session
from moe_replay.rollout.types import FinishReason, Sample, SamplingParams
from moe_replay.train.data import Prompt


class EpisodeError(MoeReplayError):
    """An environment that cannot be found, raised, or wants more turns than there are."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """One sample of a prompt, turn by turn.

    params       of one turn, n = 1
    max_length   tokens of the sequence at most
    turns        those that have begun
    """

    prompt: Prompt
    session: Session
    engine: Engine
    params: SamplingParams
    tokenizer: Any
    max_length: int
    max_turns: int = 1
    turns: int = 1

    async def begin(self, sample: Sample) -> FinishReason:
        """Take in the first turn, and see it to its end if new weights came in the middle of it."""
        self.session.absorb(sample)
        return await self._finish_turn()

    @property
    def completion(self) -> str:
        """The text of the last turn."""
        return self.tokenizer.decode(self.session.token_ids[self.session.turn_starts_at :], skip_special_tokens=True)

    @property
    def may_go_on(self) -> bool:
        """Whether another turn is allowed and has room; `observe` never takes its last place."""
        return self.turns < self.max_turns and len(self.session) < self.max_length

    def observe(self, text: str) -> None:
        """Append what the model did not say: a tool's output, the user's next message, template included."""
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        self.session.observe(ids[: max(0, self.max_length - 1 - len(self.session))])

    async def generate(self) -> FinishReason:
        """Let the model speak."""
        if not self.may_go_on:
            raise EpisodeError(
                "no further turn is allowed",
                sample=f"row {self.prompt.row}",
                expected=f"at most {self.max_turns} turns and {self.max_length} tokens",
                found=f"{self.turns} turns and {len(self.session)} tokens so far",
                remedy="Ask episode.may_go_on before episode.generate()",
            )
        self.turns += 1
        await self.session.generate(self.engine, self.params)
        return await self._finish_turn()

    async def _finish_turn(self) -> FinishReason:
        reason = self.session.finish_reason
        while reason is FinishReason.ABORT:  # new weights: the rest of the turn is theirs
            reason = await self.session.generate(self.engine, self.params)
        assert reason is not None
        return reason


Environment = Callable[[Episode], Awaitable[None]]


async def play(environment: Environment, episode: Episode) -> None:
    """Let an environment have its way with an episode; what it raises is named."""
    try:
        await environment(episode)
    except MoeReplayError:
        raise
    except Exception as error:  # a user's function may raise anything; it must be named in what follows
        name = getattr(environment, "__qualname__", repr(environment))
        raise EpisodeError(
            f"environment {name} raised {type(error).__name__}: {error}",
            sample=f"row {episode.prompt.row}",
            found=f"turn {episode.turns}, {len(episode.session)} tokens",
        ) from error


def load_environment(name: str | None) -> Environment | None:
    """`module:function`."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise EpisodeError(
            f"environment {name!r} cannot be loaded: {error}",
            expected="rollout.environment = 'module:function'",
            remedy="The module must be importable where training runs, e.g. a file in the working directory",
        ) from error
