"""`EnvironmentLoops`: event loops for environments alone: one that blocks holds up neither sampling nor scoring."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from moe_replay.errors import EngineName
from moe_replay.rollout.engine import Sampler
from moe_replay.rollout.loop import LoopThread
from moe_replay.rollout.types import Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology

T = TypeVar("T")


class EnvironmentLoops:
    """Threads with an event loop each; episodes are handed to them in turn."""

    def __init__(self, count: int) -> None:
        self._loops = [LoopThread(f"environments {number}") for number in range(count)]
        self._turns = itertools.cycle(self._loops)
        self._asked = [(loop.ping(), time.monotonic()) for loop in self._loops]

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the next loop and await it in the caller's; it is cancelled with the caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, next(self._turns).loop))

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


class SamplerOfLoop:
    """A sampler that is called in its own event loop, whichever loop the caller runs in."""

    def __init__(self, engine: Sampler, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    @property
    def name(self) -> EngineName:
        return self._engine.name

    @property
    def topology(self) -> MoeTopology:
        return self._engine.topology

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def healthy(self) -> bool:
        """Whether the engine is alive."""
        return self._engine.healthy()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        """Return `params.n` samples for each prompt."""
        return self._engine.generate(prompts, params)

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return the samples of one prompt."""
        call = self._engine.generate_one(prompt, params)
        if asyncio.get_running_loop() is self._loop:
            return await call
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def close(self) -> None:
        """Do nothing: the engine belongs to the run."""
