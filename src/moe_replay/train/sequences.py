"""`SequenceSampler`: whole sequences from an engine, with the turns that an environment adds to them.

Sequences are independent: where the engine runs calls concurrently, the second turn of one begins when its own first
turn ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from moe_replay.rollout.engine import Sampler
from moe_replay.rollout.loop import LoopThread
from moe_replay.rollout.session import Session
from moe_replay.rollout.types import Sample, SampledSequence, SamplingParams
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import Prompt
from moe_replay.train.environment_loops import EnvironmentLoops, SamplerOfLoop
from moe_replay.train.environments import environment_name, load_environment, run_environment
from moe_replay.train.episode import Episode, EpisodeError
from moe_replay.train.tools import ToolSet
from moe_replay.utils.hang_watch import WATCH

T = TypeVar("T")
ASK_S = 5.0
"""Seconds between two questions whether a wait should be given up."""
FirstTurn = Callable[[], Awaitable[Sample]]
FirstTurns = Callable[[], Sequence[FirstTurn]]
"""Called in the event loop: returns how each of the n samples of a prompt gets its first turn."""


class SequenceSampler:
    """Samples sequences in its own event loop.

    An engine with a true attribute `one_call_at_a_time` is given first turns in as few calls as possible.
    """

    def __init__(
        self, config: TrainConfig, engine: Sampler, tokenizer: Any, max_length: int, tools: ToolSet | None = None
    ) -> None:
        self.engine = engine
        self._config = config.rollout
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._tools = tools
        self._environment = load_environment(config.rollout.environment)
        self._loop = LoopThread("rollouts")
        self._environments = EnvironmentLoops(config.rollout.environment_threads if self._environment else 0)
        self._engine_for_episodes = SamplerOfLoop(engine, self._loop.loop)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop.loop)

    def close(self) -> None:
        """End the loops and what runs in them."""
        self._environments.close()
        self._loop.close()

    # ---- first turns --------------------------------------------------------------------------------------------

    def first_turns(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], *, together: bool
    ) -> list[FirstTurns]:
        """Return how each prompt gets its first turns; `params` of each, with the same n.

        With an environment every sample is a separate call, so that no turn waits for the first turn of another
        sample. Without one every prompt is, so that its samples are scored while others are sampled.

        together   the parameters of the first are those of all, and an engine that takes one call at a time gets one
        """
        one_call = bool(getattr(self.engine, "one_call_at_a_time", False))
        if self._environment is not None and not one_call:
            return [
                lambda prompt=prompt, one=one: [
                    partial(self._first_turn, prompt, _of_sample(one, index)) for index in range(one.n)
                ]
                for prompt, one in zip(prompts, params, strict=True)
            ]
        if together and one_call:
            call = asyncio.to_thread(self.engine.generate, [prompt.token_ids for prompt in prompts], params[0])
            batch = self.start(call)

            async def of_batch(place: int) -> Sequence[Sample]:
                return (await asyncio.wrap_future(batch))[place]

            calls = [lambda place=place: of_batch(place) for place in range(len(prompts))]
        else:
            calls = [
                lambda prompt=prompt, one=params[0] if together else one: self.engine.generate_one(
                    prompt.token_ids, one
                )
                for prompt, one in zip(prompts, params, strict=True)
            ]
        return [lambda call=call, n=one.n: _shared(call(), n) for call, one in zip(calls, params, strict=True)]

    async def _first_turn(self, prompt: Prompt, params: SamplingParams) -> Sample:
        (sample,) = await self.engine.generate_one(prompt.token_ids, params)
        return sample

    # ---- sequences ----------------------------------------------------------------------------------------------

    async def sample(self, prompt: Prompt, params: SamplingParams, first_turns: FirstTurns) -> list[SampledSequence]:
        """Return the sequences of a prompt; later turns are sampled with `params`, and their own seed."""
        sequences = (
            self._run_episode(first_turn, prompt, _later_turns(params, index))
            for index, first_turn in enumerate(first_turns())
        )
        return list(await asyncio.gather(*sequences))

    async def _run_episode(self, first_turn: FirstTurn, prompt: Prompt, params: SamplingParams) -> SampledSequence:
        """Return the sequence that begins with a prompt and its first turn."""
        episode = Episode(
            prompt=prompt,
            session=Session(prompt.token_ids),
            engine=self._engine_for_episodes,
            params=params,
            tokenizer=self._tokenizer,
            max_length=self._max_length,
            max_turns=self._config.max_turns,
            tools=self._tools,
        )
        await episode.start(await first_turn())
        if self._environment is not None:
            limit_s = self._config.environment_timeout_s
            await self._environments.run(run_environment(self._environment, episode, limit_s))
        return episode.session.finish()

    # ---- waiting ------------------------------------------------------------------------------------------------

    def result(self, future: Future[T]) -> T:
        """Wait for a result, and for environments: one that blocks its event loop is an error, not a wait forever."""
        self.wait(future)
        return future.result()

    def wait(self, future: Future[Any], give_up: Callable[[], bool] | None = None) -> bool:
        """Wait until a result is there, as `result` does; return False if `give_up`, asked from time to time, says so.

        give_up   asked every `ASK_S` seconds
        """
        if self._environment is None and give_up is None:
            wait([future])
            return True
        limit_s = math.inf if self._environment is None else self._config.environment_timeout_s
        asked = time.monotonic()
        with WATCH.waiting(limit_s):  # without a gap between the waits inside, each of which starts its timer anew
            while not _is_done(future, limit_s):
                self.check_environments()
                if give_up is not None and time.monotonic() - asked >= ASK_S:
                    if give_up():
                        return False
                    asked = time.monotonic()
        return True

    def check_environments(self) -> None:
        """Raise if an environment has blocked its event loop for too long."""
        limit_s = self._config.environment_timeout_s
        if self._environment is not None and self._environments.blocked_s() > limit_s:
            raise EpisodeError(
                f"environment {environment_name(self._environment)} has blocked the event loop for {limit_s:g} s",
                remedy="Await what takes long, e.g. with asyncio.to_thread, or raise rollout.environment_timeout_s",
            )


def _is_done(future: Future[Any], limit_s: float) -> bool:
    with WATCH.waiting(limit_s):
        return bool(wait([future], timeout=1.0).done)


def _shared(call: Awaitable[Sequence[Sample]], n: int) -> list[FirstTurn]:
    """Return how to await each of the n samples of one call."""
    task = asyncio.ensure_future(call)

    async def nth(index: int) -> Sample:
        return (await task)[index]

    return [partial(nth, index) for index in range(n)]


def _of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one sample of a group as a separate call, with its own seed."""
    if params.seed is None:
        return replace(params, n=1)
    return replace(params, n=1, seed=int(np.random.SeedSequence([params.seed, index]).generate_state(1)[0] >> 1))


def _later_turns(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of a sample's later turns, with a seed that differs within the group."""
    return replace(params, n=1, seed=None if params.seed is None else params.seed + 1 + index)
