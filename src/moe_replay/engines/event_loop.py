"""An event loop in a thread, so that an engine serves both blocking and asyncio callers."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Self, TypeVar

from moe_replay.engines.requests import per_prompt
from moe_replay.errors import EngineError
from moe_replay.records import Sample, SamplingParams

T = TypeVar("T")
CLOSE_TIMEOUT_S = 30.0


class LoopThread:
    """A thread that runs an event loop until it is closed."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_stuck = False
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread's loop and block until it is done."""
        self._require_open(coroutine)
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise EngineError(
                "a blocking call from the engine's own event loop would deadlock", remedy="Await generate_one instead"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()  # a no-op unless the wait was interrupted

    async def run_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread's loop and await it in the caller's; cancelled with the caller."""
        self._require_open(coroutine)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def _require_open(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self.loop.is_closed():
            coroutine.close()
            raise EngineError(f"the engine is closed ({self._thread.name})")

    def ping(self) -> threading.Event:
        """Return an event that is set as soon as the loop is idle; never, if a callback blocks it."""
        idle = threading.Event()
        self.loop.call_soon_threadsafe(idle.set)
        return idle

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop the loop and its thread; tasks that are still running are cancelled.

        A loop that a callback blocks is left behind; its thread does not keep the process alive.
        """
        if self.loop.is_closed() or self._is_stuck:
            return
        self._is_stuck = not self.ping().wait(timeout_s)
        if self._is_stuck:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def while_alive(call: Awaitable[T], failure: Callable[[], Exception | None], check_s: float = 1.0) -> T:
    """Return the result of `call`; raise the error of `failure` as soon as it returns one.

    For calls to a process that never return once that process is dead.
    """
    task = asyncio.ensure_future(call)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=check_s)
            if done:
                return task.result()
            error = failure()
            if error is not None:
                raise error
    finally:
        task.cancel()


async def gather_or_cancel(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results in order; nothing keeps running if a call has failed or the caller was cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _cancel_all() -> None:
    """Cancel every other task of this loop and wait for them to end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=5.0)


class AsyncSampler(ABC):
    """Blocking and asyncio sampling for an engine that implements `sample`, which runs in the engine's own loop."""

    def __init__(self, name: str) -> None:
        self._loop = LoopThread(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.close()

    @abstractmethod
    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt; runs in the engine's own loop."""

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        return self._loop.run(self._sample_all(prompts, params))

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return the samples of one prompt; may run concurrently with other calls, from any event loop."""
        (own_params,) = per_prompt(params, 1)
        return await self._loop.run_async(self.sample(prompt, own_params))

    async def _sample_all(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        calls = zip(prompts, per_prompt(params, len(prompts)), strict=True)
        return await gather_or_cancel(self.sample(prompt, own_params) for prompt, own_params in calls)
