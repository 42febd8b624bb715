"""Several servers used as one engine: requests go to the least loaded one, and are retried on another if it fails.

A request returns one result or fails: it is sent again only after the server that had it has failed, and a late
response of that server is dropped.
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
from typing import Any, Protocol

import numpy as np
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from torch import Tensor

from moe_replay.errors import EngineError, EngineName, EngineUnavailableError
from moe_replay.rollout.engine import Engine, StartRequest
from moe_replay.rollout.loop import AsyncSampler
from moe_replay.rollout.types import Probe, Sample, SamplingParams, Weights
from moe_replay.rollout.weights_id import CurrentWeights, identifies_weights
from moe_replay.routes.topology import MoeTopology


class ServedEngine(Engine, Protocol):
    """An engine behind a URL."""

    url: str

    def current_weights(self) -> CurrentWeights:
        """Return what the server says of its weights."""
        ...


def connect(client: Callable[..., ServedEngine], request: StartRequest, **settings: Any) -> EnginePool:
    """Connect to the servers at `request.urls` as one engine; weights are replaced before they sample."""
    servers = [request.call(client, url, token=request.bearer_token, **settings) for url in request.urls]
    return EnginePool(servers, any_version=True)


class _Member:
    """One engine of the pool, its load, and when its health is checked again after a failure."""

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.active_requests = 0
        self.down_until: float | None = None  # None: in use

    @contextmanager
    def request(self, cooldown_s: float) -> Iterator[ServedEngine]:
        """Run a request on this engine; if the engine is unavailable, take it out of rotation for `cooldown_s`."""
        self.active_requests += 1
        try:
            yield self.engine
        except EngineUnavailableError:
            self.down_until = time.monotonic() + cooldown_s
            raise
        finally:
            self.active_requests -= 1


class EnginePool(AsyncSampler):
    """Engines of one model used as one.

    attempts        tries of a request, on any engine, before it fails
    cooldown_s      seconds that an unavailable engine is left out before its health is checked again
    max_backoff_s   longest wait between two tries of a request; waits grow exponentially up to it, with jitter
    any_version     the engines may have different weights now: `update_weights` comes before the first request

    Example:
        engine = EnginePool([VllmServer(url, token=token) for url in urls])
    """

    def __init__(
        self,
        engines: Sequence[ServedEngine],
        *,
        attempts: int = 8,
        cooldown_s: float = 2.0,
        max_backoff_s: float = 10.0,
        any_version: bool = False,
    ) -> None:
        if not engines:
            raise EngineError("a pool without engines", expected="at least one")
        super().__init__("pool")
        self._members = [_Member(engine) for engine in engines]
        self._attempts, self._cooldown_s, self._max_backoff_s = attempts, cooldown_s, max_backoff_s
        versions = {engine.url: engine.weight_version for engine in engines}
        topologies = {engine.url: engine.topology for engine in engines}
        one_version = any_version or len(set(versions.values())) == 1
        if not one_version or len(set(topologies.values())) != 1:
            super().close()
            raise EngineError(
                "the engines of a pool serve different models", expected="one model, one weight version", found=versions
            )
        self._version = engines[0].weight_version
        self._weights_id = ""  # of the last update

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
        """Whether at least one engine is healthy."""
        return any(member.engine.healthy() for member in self._members)

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt from the least loaded engine; runs in the pool's own loop."""
        tries = AsyncRetrying(
            retry=retry_if_exception_type(EngineUnavailableError),
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=0.2, max=self._max_backoff_s),
            reraise=True,
        )
        async for attempt in tries:
            with attempt:
                member = await self._least_loaded()
                with member.request(self._cooldown_s) as engine:
                    return await engine.generate_one(prompt, params)
        raise AssertionError("the last attempt returns or raises")

    async def _least_loaded(self) -> _Member:
        await asyncio.gather(*(self._readmit(member) for member in self._members))
        in_rotation = [member for member in self._members if member.down_until is None]
        if not in_rotation:
            raise EngineUnavailableError(
                "no engine of the pool is available",
                found=", ".join(member.engine.url for member in self._members),
                remedy="Restart the servers; a restarted server needs the current weights before it is used",
            )
        return min(in_rotation, key=lambda member: member.active_requests)

    async def _readmit(self, member: _Member) -> None:
        """Put an engine back into rotation after its cooldown, if it is healthy and has the current weights."""
        if member.down_until is None or time.monotonic() < member.down_until:
            return
        member.down_until = time.monotonic() + self._cooldown_s  # no other task checks meanwhile
        if await asyncio.to_thread(self._is_current, member.engine):
            member.down_until = None

    def _is_current(self, engine: ServedEngine) -> bool:
        try:
            return engine.healthy() and self._has_weights(engine)
        except EngineError:
            return False

    def _has_weights(self, engine: ServedEngine) -> bool:
        version, weights_id = engine.current_weights()
        return version == self._version and (weights_id is None or weights_id == self._weights_id)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        member = self._loop.run(self._least_loaded())
        with member.request(self._cooldown_s) as engine:
            return engine.prompt_logprobs(token_ids)

    # ---- on all engines -----------------------------------------------------------------------------------------

    @property
    def identifies_weights(self) -> bool:
        """Whether samples of every engine have a weights id."""
        return all(identifies_weights(member.engine) for member in self._members)

    def lacks_weights(self) -> bool:
        """Return whether an engine is available and does not have the weights of the last update: it restarted."""
        return bool(self._weights_id) and bool(self._without_weights())

    def _without_weights(self) -> list[_Member]:
        with ThreadPoolExecutor(len(self._members)) as threads:
            lacking = list(threads.map(self._lacks_weights, (member.engine for member in self._members)))
        return [member for member, lacks in zip(self._members, lacking, strict=True) if lacks]

    def _lacks_weights(self, engine: ServedEngine) -> bool:
        try:
            return engine.healthy() and not self._has_weights(engine)
        except EngineError:
            return False

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Send new weights to every engine, reading them once; an unavailable engine is taken out of rotation.

        Raises if no engine took them, or if one rejected them. The update that was sent last goes to those engines only
        that do not have it.
        """
        again = bool(weights_id) and weights_id == self._weights_id
        self._version, self._weights_id = version, weights_id
        members = self._without_weights() if again else self._members
        queues = [_WeightQueue(weights) for _ in members]
        with ThreadPoolExecutor(len(members) or 1) as threads:
            updates = [
                threads.submit(each.update, member.engine, version, probe, weights_id)
                for each, member in zip(queues, members, strict=True)
            ]
            _broadcast(weights, queues)
        self._apply_outcomes(updates, members)

    def _apply_outcomes(self, calls: Sequence[Future[None]], members: Sequence[_Member]) -> None:
        """Take engines whose call failed out of rotation, put the others in; raise if one rejected it or all failed."""
        failures = [call.exception() for call in calls]
        for member, failure in zip(members, failures, strict=True):
            member.down_until = None if failure is None else time.monotonic() + self._cooldown_s
        rejected = next((f for f in failures if f is not None and not isinstance(f, EngineUnavailableError)), None)
        if rejected is not None:
            raise rejected
        if failures and all(member.down_until is not None for member in self._members):
            raise EngineUnavailableError("no engine of the pool is available") from failures[0]

    def sleep(self) -> None:
        self._on_all("sleep")

    def wake(self) -> None:
        self._on_all("wake")

    def abort(self) -> None:
        """Abort running requests on every engine, for all of its clients."""
        self._on_all("abort")

    def _on_all(self, command: str) -> None:
        with ThreadPoolExecutor(len(self._members)) as threads:
            calls = [threads.submit(getattr(member.engine, command)) for member in self._members]
            self._apply_outcomes(calls, self._members)

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        super().close()
        for member in self._members:
            member.engine.close()


# ---- one iterator of weights for several engines --------------------------------------------------------------------


class _WeightQueue:
    """Weights on their way to one engine. At most two tensors are queued, so a slow engine slows the producer."""

    def __init__(self, weights: Weights) -> None:
        self._folder = weights if isinstance(weights, Path) else None
        self._tensors: queue.Queue[tuple[str, Tensor] | None] = queue.Queue(maxsize=2)
        self._update_ended = threading.Event()

    def update(self, engine: Engine, version: int, probe: Probe | None, weights_id: str) -> None:
        """Update the engine from the queue; the producer is unblocked whether that succeeds or fails."""
        try:
            engine.update_weights(self._folder or self._dequeue(), version, probe, weights_id)
        finally:
            self._update_ended.set()

    def put(self, item: tuple[str, Tensor] | None) -> None:
        """Queue one tensor, or None as the end; dropped once the engine's update has ended."""
        while not self._update_ended.is_set():
            try:
                self._tensors.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _dequeue(self) -> Iterator[tuple[str, Tensor]]:
        while (item := self._tensors.get()) is not None:
            yield item


def _broadcast(weights: Weights, queues: Sequence[_WeightQueue]) -> None:
    """Read an iterator of weights once, in the caller's thread: reading it may be a collective operation."""
    if isinstance(weights, Path):
        return
    try:
        for item in weights:
            for each in queues:
                each.put(item)
    finally:
        for each in queues:
            each.put(None)
