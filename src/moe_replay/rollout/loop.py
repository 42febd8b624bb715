"""An event loop of its own for an engine, so that the same engine serves callers with and without a loop."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from moe_replay.errors import EngineError
from moe_replay.rollout.types import Sample, SamplingParams

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until it is closed."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there and wait for it here."""
        self._require_open(work)
        if threading.current_thread() is self._thread:
            work.close()
            raise EngineError(
                "a blocking call from the engine's own loop would wait for itself", remedy="Await generate_one instead"
            )
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()  # only if the wait was interrupted is it not done already

    async def along(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it there and await it in the caller's loop; cancelled with the caller."""
        self._require_open(work)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def _require_open(self, work: Coroutine[Any, Any, Any]) -> None:
        if self.loop.is_closed():
            work.close()
            raise EngineError(f"the engine is closed ({self._thread.name})")

    def close(self) -> None:
        """End the loop and its thread; what is still under way there is given up."""
        if not self.loop.is_closed():
            asyncio.run_coroutine_threadsafe(_give_up_all(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()


async def _give_up_all() -> None:
    """Cancel every task of this loop but this one, and let each end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=5.0)


class AsyncEngine(ABC):
    """Both ways to sample, for an engine that says how to sample one prompt inside its own loop."""

    def __init__(self, name: str) -> None:
        self._loop = LoopThread(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free everything."""
        self._loop.close()

    @abstractmethod
    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """`params.n` samples of one prompt; runs in the engine's own loop."""

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        """`params.n` samples for each prompt, in the order of the prompts."""
        return self._loop.run(self._sample_all(prompts, params))

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """The samples of one prompt, while others are under way; from any event loop."""
        return await self._loop.along(self.sample(prompt, params))

    async def _sample_all(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        tasks = [asyncio.ensure_future(self.sample(prompt, params)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:  # where one failed, or the caller gave up, nothing is left running
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
