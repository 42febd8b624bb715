"""Several engines used as one: requests go to the one with the least to do, and from a dead one to another.

A request is answered once or fails: it is sent again only after the engine that had it is known not to answer, and what
an engine that was given up might still say is not listened to.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from torch import Tensor

from moe_replay.errors import EngineError, EngineName, EngineUnavailableError
from moe_replay.rollout.engine import Engine, StartRequest
from moe_replay.rollout.loop import AsyncEngine
from moe_replay.rollout.types import Probe, Sample, SamplingParams, Weights
from moe_replay.routes.topology import MoeTopology


class ServedEngine(Engine, Protocol):
    """An engine with an address."""

    url: str


def connect(client: Callable[..., ServedEngine], request: StartRequest) -> EnginePool:
    """Connect to the servers at `request.urls` as one engine; weights are replaced before they sample."""
    servers = [request.call(client, url, token=request.bearer_token) for url in request.urls]
    return EnginePool(servers, any_version=True)


class _Member:
    """One engine of the pool: how much it has to do, and until when it is left alone."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.under_way = 0
        self.down_until: float | None = None  # None: in use

    @contextmanager
    def request(self, rest: float) -> Iterator[ServedEngine]:
        """A request under way; an engine that turns out not to answer rests for a while."""
        self.under_way += 1
        try:
            yield self.engine
        except EngineUnavailableError:
            self.down_until = time.monotonic() + rest
            raise
        finally:
            self.under_way -= 1


class EnginePool(AsyncEngine):
    """Engines of one model behind one face.

    attempts   how often a request is tried, on whichever engine, before it fails
    rest       seconds that an engine which did not answer is left alone, before its health is asked again
    patience   longest wait in seconds between two tries of a request; waits grow up to it, at random
    any_version  the engines may have different weights now: `update_weights` comes before the first request

    Example:
        engine = EnginePool([VllmServer(url, token=token) for url in urls])
    """

    def __init__(
        self,
        engines: Sequence[ServedEngine],
        *,
        attempts: int = 8,
        rest: float = 2.0,
        patience: float = 10.0,
        any_version: bool = False,
    ) -> None:
        if not engines:
            raise EngineError("a pool without engines", expected="at least one")
        super().__init__("pool")
        self._members = [_Member(engine) for engine in engines]
        self._attempts, self._rest, self._patience = attempts, rest, patience
        versions = {engine.url: engine.weight_version for engine in engines}
        topologies = {engine.url: engine.topology for engine in engines}
        one_version = any_version or len(set(versions.values())) == 1
        if not one_version or len(set(topologies.values())) != 1:
            super().close()
            raise EngineError(
                "the engines of a pool serve different models", expected="one model, one weight version", found=versions
            )
        self._version = engines[0].weight_version

    @cached_property
    def name(self) -> EngineName:
        first = self._members[0].engine.name
        return EngineName(f"{len(self._members)} x {first.name}", first.version)

    @cached_property
    def topology(self) -> MoeTopology:
        return self._members[0].engine.topology

    @property
    def weight_version(self) -> int:
        return self._version

    def healthy(self) -> bool:
        """Whether at least one engine answers."""
        return any(member.engine.healthy() for member in self._members)

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """`params.n` samples of one prompt, from whichever engine answers; runs in the pool's own loop."""
        tries = AsyncRetrying(
            retry=retry_if_exception_type(EngineUnavailableError),
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=0.2, max=self._patience),
            reraise=True,
        )
        async for attempt in tries:
            with attempt:
                member = await self._least_busy()
                with member.request(self._rest) as engine:
                    return await engine.generate_one(prompt, params)
        raise AssertionError("the last attempt returns or raises")

    async def _least_busy(self) -> _Member:
        await asyncio.gather(*(self._revive(member) for member in self._members))
        in_use = [member for member in self._members if member.down_until is None]
        if not in_use:
            raise EngineUnavailableError(
                "no engine of the pool answers",
                found=", ".join(member.engine.url for member in self._members),
                remedy="Start the servers again; a server that starts anew needs the current weights first",
            )
        return min(in_use, key=lambda member: member.under_way)

    async def _revive(self, member: _Member) -> None:
        """Use an engine again that has rested, answers, and has the weights of the others."""
        if member.down_until is None or time.monotonic() < member.down_until:
            return
        member.down_until = time.monotonic() + self._rest  # nobody else asks meanwhile
        if await asyncio.to_thread(self._may_serve, member.engine):
            member.down_until = None

    def _may_serve(self, engine: ServedEngine) -> bool:
        try:
            return engine.healthy() and engine.weight_version == self._version
        except EngineError:
            return False

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        member = self._loop.run(self._least_busy())
        with member.request(self._rest) as engine:
            return engine.prompt_logprobs(token_ids)

    # ---- all at once --------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Send new weights to every engine, reading them once; one that cannot take them is left out from here on.

        Raises where none could take them, or where one refused them: then they are wrong.
        """
        self._version = version
        streams = _copies(weights, len(self._members))
        with ThreadPoolExecutor(len(self._members)) as threads:
            updates = [
                threads.submit(stream.feed, member.engine, version, probe)
                for stream, member in zip(streams, self._members, strict=True)
            ]
            _distribute(weights, streams)
        self._settle(updates)

    def _settle(self, updates: Sequence[Future[None]]) -> None:
        failures = [update.exception() for update in updates]
        for member, failure in zip(self._members, failures, strict=True):
            member.down_until = None if failure is None else time.monotonic() + self._rest
        refused = next((f for f in failures if f is not None and not isinstance(f, EngineUnavailableError)), None)
        if refused is not None:
            raise refused
        if all(failures):
            raise EngineUnavailableError("no engine of the pool took the new weights") from failures[0]

    def sleep(self) -> None:
        self._everywhere("sleep")

    def wake(self) -> None:
        self._everywhere("wake")

    def abort(self) -> None:
        """End what is being sampled, on every engine, for all of its clients."""
        self._everywhere("abort")

    def _everywhere(self, command: str) -> None:
        with ThreadPoolExecutor(len(self._members)) as threads:
            self._settle([threads.submit(getattr(member.engine, command)) for member in self._members])

    def close(self) -> None:
        """Close the connections; the servers go on."""
        super().close()
        for member in self._members:
            member.engine.close()


# ---- one stream of weights for several engines ----------------------------------------------------------------------


class _Stream:
    """The weights on their way to one engine; at most two tensors wait, so that a slow engine slows the sender."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._waiting: queue.Queue[tuple[str, Tensor] | None] = queue.Queue(maxsize=2)
        self._given_up = threading.Event()

    def feed(self, engine: Engine, version: int, probe: Probe | None) -> None:
        """Give all weights to the engine; whatever happens, the sender is not left waiting."""
        try:
            engine.update_weights(self._folder or self._arriving(), version, probe)
        finally:
            self._given_up.set()

    def put(self, item: tuple[str, Tensor] | None) -> None:
        """Send one tensor, or the end; dropped where the engine takes no more."""
        while not self._given_up.is_set():
            try:
                self._waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _arriving(self) -> Iterator[tuple[str, Tensor]]:
        while (item := self._waiting.get()) is not None:
            yield item


def _copies(weights: Weights, count: int) -> list[_Stream]:
    folder = weights if isinstance(weights, Path) else None
    return [_Stream(folder) for _ in range(count)]


def _distribute(weights: Weights, streams: Sequence[_Stream]) -> None:
    """Read an iterator of weights once, in the caller's thread: reading it may be a collective operation."""
    if isinstance(weights, Path):
        return
    try:
        for item in weights:
            for stream in streams:
                stream.put(item)
    finally:
        for stream in streams:
            stream.put(None)
