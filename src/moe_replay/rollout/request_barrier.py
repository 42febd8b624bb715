"""`RequestBarrier`: requests run while it is open; a weight update closes it and has the engine to itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress


class RequestBarrier:
    """Gate for engine requests, bound to one event loop that may not have started.

    active   ids of the running requests
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.active: set[str] = set()
        self._loop = loop
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._request_ended = asyncio.Condition()
        self._numbers = itertools.count()

    @asynccontextmanager
    async def request(self, kind: str = "request") -> AsyncIterator[str]:
        """Wait until the barrier is open, then run a request; yields its id, which begins with its kind."""
        await self._wait_until_open()
        request_id = self.new_request_id(kind)
        self.active.add(request_id)
        try:
            yield request_id
        finally:
            self.active.discard(request_id)
            async with self._request_ended:
                self._request_ended.notify_all()

    def new_request_id(self, kind: str = "request") -> str:
        """Return an unused request id."""
        return f"{kind} {next(self._numbers)}"

    async def close(self, abort: Callable[[], Awaitable[None]]) -> None:
        """Hold new requests back and abort the running ones; return when none is running."""
        await self._wait_until_open()
        self._is_open.clear()
        with self.open_on_error():
            while self.active:
                await abort()  # repeated: a request may have been on its way to the engine, and unknown there
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2), self._request_ended:
                        await self._request_ended.wait()

    def shut(self) -> None:
        """Hold new requests back; running ones continue. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def open(self) -> None:
        """Let waiting requests run; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._is_open.set)

    @contextmanager
    def open_on_error(self) -> Iterator[None]:
        """Open the barrier if the block raises, so that waiting requests run and see the error state."""
        with ExitStack() as undo:
            undo.callback(self.open)
            yield
            undo.pop_all()

    async def _wait_until_open(self) -> None:
        while not self._is_open.is_set():  # a task that was woken first may have closed it again
            await self._is_open.wait()
