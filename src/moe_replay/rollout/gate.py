"""`Gate`: who may use an engine when. Requests pass while it is open; a change of weights has the engine for itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress


class Gate:
    """Belongs to one event loop, which need not run yet when the gate is made."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.under_way: set[str] = set()
        self._loop = loop
        self._open = asyncio.Event()
        self._open.set()
        self._quiet = asyncio.Condition()  # told when a request has ended
        self._numbers = itertools.count()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[str]:
        """A request under way, from when the gate is open; its name."""
        await self._until_open()
        name = self.new_name()
        self.under_way.add(name)
        try:
            yield name
        finally:
            self.under_way.discard(name)
            async with self._quiet:
                self._quiet.notify_all()

    def new_name(self) -> str:
        """A name that no request has."""
        return f"request {next(self._numbers)}"

    async def shut(self, abort: Callable[[], Awaitable[None]]) -> None:
        """What is under way is aborted, what comes waits; when this returns nothing is under way."""
        await self._until_open()
        self._open.clear()
        with self.or_open():
            while self.under_way:
                await abort()  # again where one was on its way to the engine, and not yet known there
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2), self._quiet:
                        await self._quiet.wait()

    def open(self) -> None:
        """Let in who waits; from any thread."""
        self._loop.call_soon_threadsafe(self._open.set)

    @contextmanager
    def or_open(self) -> Iterator[None]:
        """A step that must succeed: where it fails, whoever waits is let in, to be told so."""
        with ExitStack() as undo:
            undo.callback(self.open)
            yield
            undo.pop_all()

    async def _until_open(self) -> None:
        while not self._open.is_set():  # one who was let in before us may have shut it again
            await self._open.wait()
