"""Several servers used as one engine: requests go to the least loaded one, and are retried on another if it fails.

A request returns one result or fails: it is sent again only after the server that had it has failed, and a late
response of that server is dropped. A server whose answers cannot be used, or that refuses what another one serves, is
quarantined until it has accepted the next weight update.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from moe_replay.errors import EngineAnswerError, EngineError, EngineName, EngineUnavailableError
from moe_replay.rollout.adapter import Adapter
from moe_replay.rollout.answers import vocabulary_size
from moe_replay.rollout.engine import StartRequest, put_to_sleep, receivers_of, wake_for_update
from moe_replay.rollout.loop import AsyncSampler
from moe_replay.rollout.pool_member import LISTED_S, Member, ServedEngine, ServerList, ServerState, following
from moe_replay.rollout.pool_transfer import update_by_transfer, update_together
from moe_replay.rollout.pool_update import update_side_by_side
from moe_replay.rollout.request_barrier import RequestBarrier
from moe_replay.rollout.types import Probe, Sample, SamplingParams
from moe_replay.rollout.vllm.transfer_engines import EngineTransfer
from moe_replay.rollout.weights.delta import SentWeights
from moe_replay.rollout.weights.identity import identifies_weights
from moe_replay.rollout.weights.transfer import Receivers, Transfer
from moe_replay.rollout.weights.types import Weights
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.messages import one_line

logger = logging.getLogger(__name__)


def connect(client: Callable[..., ServedEngine], request: StartRequest, **settings: Any) -> EnginePool:
    """Connect to the servers at `request.urls` as one engine; weights are replaced before they sample."""
    settings |= {"token": request.bearer_token, "vocab_size": vocabulary_size(request.model)}
    servers = [request.call(client, url, **settings) for url in request.urls]
    return EnginePool(servers, any_version=True, min_servers=request.min_servers)


class EnginePool(AsyncSampler):
    """Engines of one model used as one.

    attempts        tries of a request, on any engine, before it fails
    cooldown_s      seconds that an unavailable engine is left out before its health is checked again
    max_backoff_s   longest wait between two tries of a request; waits grow exponentially up to it, with jitter
    any_version     the engines may have different weights now: `update_weights` comes before the first request
    min_servers     engines that must be reachable now, a warning tells of the others; None: all

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
        min_servers: int | None = None,
    ) -> None:
        if not engines:
            raise EngineError("a pool without engines", expected="at least one")
        super().__init__("pool")
        self._members = [Member(engine) for engine in engines]
        self._attempts, self._cooldown_s, self._max_backoff_s = attempts, cooldown_s, max_backoff_s
        self._weights_id = ""  # of the last update
        self.bytes_sent: int | None = None  # by it to an engine, the most to any; None: not known
        self._sent: SentWeights | None = None
        self._barrier = RequestBarrier(self._loop.loop)  # closed while another process updates the servers
        self._listed: ServerList | None = None
        with ExitStack() as undo:
            undo.callback(super().close)
            self._version = self._reach(min_servers or len(engines), any_version)
            undo.pop_all()

    def _reach(self, required: int, any_version: bool) -> int:
        """Ask every engine for its model and return the weight version; raise unless enough of them serve the same."""
        versions: dict[str, int] = {}
        topologies: set[MoeTopology] = set()
        failures: list[EngineError] = []
        for member in self._members:
            try:
                versions[member.engine.url] = member.engine.weight_version
                topologies.add(member.engine.topology)
            except EngineError as failure:
                versions.pop(member.engine.url, None)
                member.take_out(failure, 0.0)
                failures.append(failure)
        if len(versions) < required and len(failures) == 1:
            raise failures[0]
        if len(versions) < required:
            raise EngineUnavailableError(
                "too few servers can be used", expected=f"at least {required}", found=self._causes()
            )
        for member in self._members:
            if member.cause:
                logger.warning("a rollout server cannot be used and is left out until it can: %s", member)
        if (not any_version and len(set(versions.values())) != 1) or len(topologies) != 1:
            raise EngineError(
                "the engines of a pool serve different models", expected="one model, one weight version", found=versions
            )
        return next(iter(versions.values()))

    def _out_of_rotation(self) -> list[Member]:
        return [member for member in self._members if member.down_until is not None]

    def _causes(self) -> str:
        return "; ".join(map(str, self._out_of_rotation()))

    @cached_property
    def _first(self) -> ServedEngine:
        """An engine that could be reached."""
        return next(member.engine for member in self._members if "topology" in vars(member.engine))

    @cached_property
    def name(self) -> EngineName:
        first = self._first.name
        return EngineName(f"{len(self._members)} x {first.name}", first.version)

    @cached_property
    def topology(self) -> MoeTopology:
        return self._first.topology

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
                async with self._barrier.request():
                    return await self._sample_once(prompt, params)
        raise AssertionError("the last attempt returns or raises")

    async def _sample_once(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Try each available engine until one serves the request; those that refused it before are quarantined."""
        refusals: dict[Member, EngineError] = {}
        while True:
            member = await self._least_loaded(refusals)
            try:
                with member.request(self._cooldown_s) as engine:
                    samples = await engine.generate_one(prompt, params)
            except EngineUnavailableError:
                raise
            except EngineAnswerError:
                continue
            except EngineError as refusal:
                refusals[member] = refusal
                continue
            for other, refusal in refusals.items():
                other.take_out(refusal, math.inf)
            return samples

    async def _least_loaded(self, refusals: Mapping[Member, EngineError] | None = None) -> Member:
        """Return the engine with the fewest requests, of those that have not refused this one."""
        refused = refusals or {}
        await asyncio.gather(*(self._readmit(member) for member in self._members))
        in_rotation = [member for member in self._members if member.down_until is None and member not in refused]
        if in_rotation:
            return min(in_rotation, key=lambda member: member.active_requests)
        told = [*map(one_line, refused.values()), *map(str, self._out_of_rotation())]
        may_return = any(not member.is_quarantined for member in self._out_of_rotation())
        if refused and not may_return:
            if len(refused) == 1:
                raise next(iter(refused.values()))
            raise EngineError("every server refused a request", found="; ".join(told))
        if not may_return:
            raise EngineAnswerError("no rollout server is left", found="; ".join(told), remedy="Restart the servers")
        raise EngineUnavailableError(
            "no engine of the pool is available",
            found="; ".join(told),
            remedy="Restart the servers; a restarted server needs the current weights before it is used",
        )

    async def _readmit(self, member: Member) -> None:
        """Put an engine back into rotation after its cooldown, if it is healthy and has the current weights."""
        if member.down_until is None or time.monotonic() < member.down_until:
            return
        member.down_until = time.monotonic() + self._cooldown_s  # no other task checks meanwhile
        if await asyncio.to_thread(self._is_current, member.engine):
            member.put_back()

    def _is_current(self, engine: ServedEngine) -> bool:
        with suppress(EngineError):
            return engine.healthy() and engine.topology == self.topology and self._has_weights(engine)
        return False

    def _has_weights(self, engine: ServedEngine) -> bool:
        version, weights_id = engine.current_weights()
        return version == self._version and (weights_id is None or weights_id == self._weights_id)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        member = self._loop.run(self._least_loaded())
        with member.request(self._cooldown_s) as engine:
            return engine.prompt_logprobs(token_ids)

    # ---- joining and leaving ------------------------------------------------------------------------------------

    def follow(self, urls: Callable[[], Sequence[str]], client: Callable[[str], ServedEngine]) -> None:
        """Let servers join and leave while the pool is used, by a list of those that there are (`ServerList`).

        The list is read by `lacks_weights`, before each step samples and every few seconds meanwhile, and by
        `wait_for_servers`. A server that has joined is used once it has the weights of the last update. One that has
        left gets no new requests, and those that it fails go to others; an empty list changes nothing.
        """
        self._listed = ServerList(urls, client)

    def _update_members(self) -> bool:
        """Return whether servers have joined or left."""
        before, listed = self._members, self._listed
        if listed is None or (members := listed.members(before)) is before:
            return False
        self._members = members  # other threads see the whole list, old or new
        vars(self).pop("name", None)  # it counts them
        return True

    def wait_for_servers(self) -> bool:
        """Use the servers that are listed now; wait for others while none can be reached. Return whether one can be.

        Given up when the list has not changed for `LISTED_S` seconds, and at once if there is none.
        """
        self._update_members()
        end = time.monotonic() + LISTED_S
        while self._listed is not None and time.monotonic() < end:
            if self.healthy():
                return True
            time.sleep(0.2)
            if self._update_members():
                end = time.monotonic() + LISTED_S
        return False

    # ---- on all engines -----------------------------------------------------------------------------------------

    @property
    def identifies_weights(self) -> bool:
        """Whether samples of every engine have a weights id."""
        return all(identifies_weights(member.engine) for member in self._members)

    def lacks_weights(self) -> bool:
        """Return whether an engine is available and does not have the weights of the last update: it restarted."""
        self._update_members()
        return bool(self._weights_id) and bool(self._without_weights())

    def _without_weights(self) -> list[Member]:
        asked = [member for member in self._members if not member.is_quarantined]  # others did not take them
        with ThreadPoolExecutor(len(asked) or 1) as threads:
            lacking = list(threads.map(self._lacks_weights, (member.engine for member in asked)))
        return [member for member, lacks in zip(asked, lacking, strict=True) if lacks]

    def _lacks_weights(self, engine: ServedEngine) -> bool:
        with suppress(EngineError):
            return engine.healthy() and not self._has_weights(engine)
        return False

    def update_weights(
        self, weights: Weights | Adapter, version: int, probe: Probe | None = None, weights_id: str = ""
    ) -> None:
        """Send new weights, or an adapter, to every engine, reading them once; those that fail leave the rotation.

        Raises if no engine took them. The update that was sent last goes to those engines only that do not have it.
        """
        again = bool(weights_id) and weights_id == self._weights_id
        self._version, self._weights_id, self.bytes_sent = version, weights_id, None
        members = self._without_weights() if again else self._members
        if isinstance(weights, EngineTransfer):
            members = self._members
            updates = update_together([one.engine for one in members], weights, version, probe, weights_id)
        elif isinstance(weights, Transfer):
            members = self._members_in(weights, members)
            updates = update_by_transfer([one.engine for one in members], weights, version, probe, weights_id)
        else:
            engines = [member.engine for member in members]
            updates = update_side_by_side(engines, weights, version, probe, weights_id, self._sent)
            self.bytes_sent = max((one.result() or 0 for one in updates if one.exception() is None), default=0)
        self._apply_outcomes(updates, members)

    update_adapter = update_weights  # to engines that have LoRA enabled

    def send_changes(self, full_every: int) -> None:
        """Send only what has changed since the last update; copies of the weights are kept here and on each server."""
        self._sent = SentWeights(full_every)

    def _members_in(self, transfer: Transfer, members: Sequence[Member]) -> list[Member]:
        """Return the engines that take part in a transfer; others could not be reached when it began."""
        for member in members:
            if member.engine.url not in transfer.settings:
                member.take_out(EngineUnavailableError("it could not be reached for a weight update"), self._cooldown_s)
        return [member for member in self._members if member.engine.url in transfer.settings]

    def receivers_by_url(self, weights_id: str = "") -> dict[str, Receivers | None]:
        """Return what would take part in a transfer, of all engines that can be reached and lack these weights."""
        again = bool(weights_id) and weights_id == self._weights_id
        members = [one for one in self._members if one.engine.healthy()]
        members = [one for one in members if self._lacks_weights(one.engine)] if again else members
        return {member.engine.url: receivers_of(member.engine) for member in members}

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self._members)

    def unreachable(self) -> list[str]:
        """Return the URLs of the engines that do not answer."""
        return [member.engine.url for member in self._members if not member.engine.healthy()]

    def _apply_outcomes(self, calls: Sequence[Future[Any]], members: Sequence[Member]) -> None:
        """Take engines whose call failed out of rotation, put the others in; raise if none is left."""
        failures = [call.exception() for call in calls]
        for member, failure in zip(members, failures, strict=True):
            if failure is None:
                member.put_back()
            elif isinstance(failure, EngineError):
                member.take_out(failure, self._cooldown_s if isinstance(failure, EngineUnavailableError) else math.inf)
            else:
                raise failure
        rejections = [f for f in failures if f is not None and not isinstance(f, EngineUnavailableError)]
        if failures and len(self._out_of_rotation()) == len(self._members):
            if len(self._members) == 1 and rejections:
                raise rejections[0]
            kind = EngineError if rejections else EngineUnavailableError
            raise kind("no rollout server is left", found=self._causes()) from (rejections or failures)[0]

    @property
    def server_states(self) -> dict[str, ServerState]:
        """States of the servers by URL, for pools in other processes."""
        return {member.engine.url: member.state for member in self._members}

    def follow_update(self, version: int, weights_id: str) -> None:
        """Hold requests back for an update that another process sends to the servers; samples of it are accepted.

        Where clients stamp samples themselves (`drains`), running requests are aborted and have ended on return.
        """
        clients = [following(member.engine) for member in self._members]
        if any(one.drains for one in clients):
            self._loop.run(self._barrier.close(partial(asyncio.to_thread, self.abort)))
        else:
            self._barrier.shut()
        self._version, self._weights_id = version, weights_id
        for one in clients:
            one.follow_update(version, weights_id)

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        """Use the servers that the pool which has sent the update uses, and release waiting requests."""
        self._update_members()
        for member in self._members:
            member.follow(states.get(member.engine.url), self._cooldown_s)
        self._barrier.open()

    def sleep(self, level: int = 1) -> None:
        """Free memory on every engine; with level 2, those that can drop their weights do."""
        self._on_all(lambda engine: put_to_sleep(engine, level))

    def wake(self) -> None:
        self._on_all(lambda engine: engine.wake())

    def wake_for_update(self) -> None:
        """Prepare every engine for an update."""
        self._on_all(wake_for_update)

    def abort(self) -> None:
        """Abort running requests on every engine, for all of its clients."""
        self._on_all(lambda engine: engine.abort())

    def _on_all(self, command: Callable[[ServedEngine], None]) -> None:
        with ThreadPoolExecutor(len(self._members)) as threads:
            calls = [threads.submit(command, member.engine) for member in self._members]
            self._apply_outcomes(calls, self._members)

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        super().close()
        for engine in [*(self._listed.left if self._listed else ()), *(member.engine for member in self._members)]:
            engine.close()
