"""Several servers used as one engine: requests go to the least loaded one, and are retried on another if it fails.

A request returns one result or fails: it is sent again only after the server that had it has failed, and a late
response of that server is dropped. A server whose answers cannot be used, or that refuses a request that another one
serves, is quarantined until it has accepted the next weight update.

A weight update reads the weights once, in the caller's thread, and goes to all servers side by side. A server that
fails it leaves the rotation; the update fails only if no server took it. An update with the id of the last one is a
repetition for servers that have restarted, and goes only to those that lack it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential
from torch import Tensor

from moe_replay.engines.base import Engine, Refusals, ServedEngine, ServerState, StartRequest
from moe_replay.engines.event_loop import AsyncSampler
from moe_replay.engines.http import vocabulary_size
from moe_replay.engines.requests import RequestBarrier
from moe_replay.errors import EngineAnswerError, EngineError, EngineName, EngineUnavailableError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.misc import one_line
from moe_replay.weights.checkpoint import ChunkStream, send_chunks
from moe_replay.weights.identity import ForeignWeightsError, Probe
from moe_replay.weights.lora_adapter import Adapter
from moe_replay.weights.source import Weights
from moe_replay.weights.transfer import Receivers, Transfer, forward_messages

logger = logging.getLogger(__name__)
LISTED_S = 120.0
"""Seconds after which a server that was lost is no longer listed: more than a cluster takes to notice."""
MAX_EMPTY_ABORTS = 3
"""Times that a server may abort one request before its first token without a weight update."""


def connect(client: Callable[..., ServedEngine], request: StartRequest, **settings: Any) -> EnginePool:
    """Connect to the servers at `request.urls` as one engine; weights are replaced before they sample."""
    settings |= {"token": request.bearer_token, "vocab_size": vocabulary_size(request.model)}
    servers = [request.call(client, url, **settings) for url in request.urls]
    return EnginePool(servers, any_version=True, min_servers=request.min_servers)


class EnginePool(AsyncSampler, Engine):
    """Engines of one model used as one.

    attempts        tries of a request, on any engine, before it fails
    cooldown_s      seconds that an unavailable engine is left out before its health is checked again
    max_backoff_s   longest wait between two tries of a request; waits grow exponentially up to it, with jitter
    any_version     the engines may have different weights now: `update_weights` comes before the first request
    min_servers     engines that must be reachable now, a warning names the others; None: all

    Example:
        engine = EnginePool([RolloutClient(url, token=token) for url in urls])
    """

    bytes_sent: int | None

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
        self.bytes_sent = None  # by it to a server, the most to any
        self._barrier = RequestBarrier(self._loop.loop)  # closed while another process updates the servers
        self._listed: Callable[[], Sequence[str]] | None = None  # servers that there are, where they may join and leave
        self._client: Callable[[str], ServedEngine] | None = None  # connects to one that has joined
        self._left: list[ServedEngine] = []
        with ExitStack() as undo:
            undo.callback(super().close)
            self._version = self._reach(min_servers or len(engines), any_version)
            undo.pop_all()

    def _reach(self, required: int, any_version: bool) -> int:
        """Ask every engine for its model and return the weight version; raise unless enough of them serve the same."""
        versions: dict[str, int] = {}
        topologies: dict[str, MoeTopology] = {}
        failures: list[EngineError] = []
        for member in self._members:
            try:
                versions[member.engine.url] = member.engine.weight_version
                topologies[member.engine.url] = member.engine.topology
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
                logger.warning("rollout server cannot be used and is left out until it can: %s", member)
        _require_equal("models", {url: _describe(topology) for url, topology in topologies.items()})
        if not any_version:
            _require_equal("weights", {url: {"weight version": version} for url, version in versions.items()})
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

    @property
    def weights_id(self) -> str:
        return self._weights_id

    def healthy(self) -> bool:
        return any(member.engine.healthy() for member in self._members)

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt from the least loaded engine; runs in the pool's own loop."""
        empty_aborts: Counter[Member] = Counter()
        while True:
            before = self._weights_id
            member, samples = await self._sample_with_retries(prompt, params)
            if not all(map(_is_empty_abort, samples)) or before != self._weights_id:
                return samples
            # Nothing was updated: a server that never samples would be asked forever.
            empty_aborts[member] += 1
            if empty_aborts[member] == MAX_EMPTY_ABORTS:
                problem = f"aborted a request {MAX_EMPTY_ABORTS} times before its first token, without a weight update"
                member.refuse(EngineAnswerError(f"{member.engine.url} {problem}"))

    async def _sample_with_retries(self, prompt: Sequence[int], params: SamplingParams) -> tuple[Member, list[Sample]]:
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

    async def _sample_once(self, prompt: Sequence[int], params: SamplingParams) -> tuple[Member, list[Sample]]:
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
            for refuser, refusal in refusals.items():
                refuser.take_out(refusal, math.inf)
            return member, samples

    async def _least_loaded(self, refusals: Mapping[Member, EngineError] | None = None) -> Member:
        """Return the engine with the fewest requests, of those that have not refused this one."""
        refused = refusals or {}
        await asyncio.gather(*(self._readmit(member) for member in self._members))
        in_rotation = [member for member in self._members if member.down_until is None and member not in refused]
        if in_rotation:
            return min(in_rotation, key=lambda member: member.active_requests)
        causes = "; ".join([*map(one_line, refused.values()), *map(str, self._out_of_rotation())])
        may_return = any(not member.is_quarantined for member in self._out_of_rotation())
        if refused and not may_return:
            if len(refused) == 1:
                raise next(iter(refused.values()))
            raise EngineError("every server refused a request", found=causes)
        if not may_return:
            raise EngineAnswerError("no rollout server is left", found=causes, remedy="Restart the servers")
        raise EngineUnavailableError(
            "no engine of the pool is available",
            found=causes,
            remedy="Restart the servers; a restarted server needs the current weights before it is used",
        )

    async def _readmit(self, member: Member) -> None:
        """Put an engine back into rotation after its cooldown, if it is healthy and has the current weights."""
        if member.down_until is None or time.monotonic() < member.down_until:
            return
        member.down_until = time.monotonic() + self._cooldown_s  # so that no other task checks it too
        if await asyncio.to_thread(self._is_current, member.engine) and not member.is_quarantined:
            member.put_back()  # else an answer that arrived in the meantime was refused

    def _is_current(self, engine: ServedEngine) -> bool:
        with suppress(EngineError):
            return engine.healthy() and engine.topology == self.topology and self._has_weights(engine)
        return False

    def _has_weights(self, engine: ServedEngine) -> bool:
        return engine.current_weights() == (self._version, self._weights_id)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        member = self._loop.run(self._least_loaded())
        with member.request(self._cooldown_s) as engine:
            return engine.prompt_logprobs(token_ids)

    # ---- joining and leaving ------------------------------------------------------------------------------------

    def follow(self, urls: Callable[[], Sequence[str]], client: Callable[[str], ServedEngine]) -> None:
        """Let servers join and leave while the pool is used, by a list of those that there are.

        The list is read by `lacks_weights`, before each step samples and every few seconds while it does, and by
        `wait_for_servers`. A server that has joined is used once it has the weights of the last update. One that has
        left gets no new requests, and those that it fails go to others; an empty list changes nothing.

        urls     returns the addresses of all servers now; it may wait for the first one
        client   connects to one that has joined
        """
        self._listed, self._client = urls, client

    def _update_members(self) -> bool:
        """Return whether servers have joined or left."""
        if self._listed is None or self._client is None:
            return False
        urls = list(dict.fromkeys(self._listed()))
        by_url = {member.engine.url: member for member in self._members}
        if not urls or set(urls) == by_url.keys():
            return False
        # Other threads see the whole list, old or new.
        self._members = [by_url.pop(url) if url in by_url else _joined(self._client(url)) for url in urls]
        self._left += [member.engine for member in by_url.values()]
        vars(self).pop("name", None)  # it counts them
        return True

    def wait_for_servers(self) -> bool:
        """Use the servers that are listed now; wait for others while none can be reached. Return whether one can be.

        Given up when the list has not changed for `LISTED_S` seconds, and immediately if there is no list.
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

    def lacks_weights(self) -> bool:
        """Whether a server can be reached and does not have the weights of the last update: it restarted."""
        self._update_members()
        return bool(self._weights_id) and bool(self._without_weights())

    def _without_weights(self) -> list[Member]:
        members = [member for member in self._members if not member.is_quarantined]  # others did not take them
        with ThreadPoolExecutor(len(members) or 1) as threads:
            lacking = list(threads.map(self._lacks_weights, (member.engine for member in members)))
        return [member for member, lacks in zip(members, lacking, strict=True) if lacks]

    def _lacks_weights(self, engine: ServedEngine) -> bool:
        with suppress(EngineError):
            return engine.healthy() and not self._has_weights(engine)
        return False

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Send new weights to every server, reading them once; servers that fail leave the rotation.

        Raises if no server took them.
        """
        members = self._begin_update(version, weights_id)
        if isinstance(weights, Path):
            calls = _side_by_side(lambda engine: engine.update_weights(weights, version, probe, weights_id), members)
            self._apply_outcomes(calls, members)
            return
        self._send_tensors(
            members, weights, lambda engine, stream: engine.update_weights(stream, version, probe, weights_id)
        )

    def update_adapter(self, adapter: Adapter, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Send an adapter to every server, as `update_weights` does; they must have LoRA enabled."""
        self._send_tensors(
            self._begin_update(version, weights_id),
            adapter.tensors,
            lambda engine, stream: engine.update_adapter(replace(adapter, tensors=stream), version, probe, weights_id),
        )

    def receive_weights(
        self, transfer: Transfer, version: int, probe: Probe | None = None, weights_id: str = ""
    ) -> None:
        """Have every server of a transfer take part in it; the messages are read in the caller's thread."""
        members = self._members_in(transfer, self._begin_update(version, weights_id))
        calls = forward_messages(
            {member.engine.url: member.engine for member in members},
            transfer,
            lambda engine, messages: engine.receive_weights(messages, version, probe, weights_id),
        )
        self._apply_outcomes(list(calls.values()), members)

    def _begin_update(self, version: int, weights_id: str) -> Sequence[Member]:
        """Return the members that an update goes to: all of them, or after a repetition those that lack it."""
        is_repetition = bool(weights_id) and weights_id == self._weights_id
        self._version, self._weights_id, self.bytes_sent = version, weights_id, None
        if is_repetition:
            return self._without_weights()
        return [member for member in self._members if not member.is_excluded]

    def _send_tensors(
        self,
        members: Sequence[Member],
        tensors: Iterable[tuple[str, Tensor]],
        update: Callable[[ServedEngine, ChunkStream], None],
    ) -> None:
        calls = send_chunks([member.engine for member in members], tensors, update)
        self.bytes_sent = max((call.result() for call in calls if call.exception() is None), default=0)
        self._apply_outcomes(calls, members)

    def _members_in(self, transfer: Transfer, members: Sequence[Member]) -> list[Member]:
        """Return the members that take part in a transfer; others could not be reached when it began."""
        for member in members:
            if member.engine.url not in transfer.settings:
                member.take_out(EngineUnavailableError("it could not be reached for a weight update"), self._cooldown_s)
        return [member for member in self._members if member.engine.url in transfer.settings]

    def receivers_by_url(self, weights_id: str = "") -> dict[str, Receivers | None]:
        is_repetition = bool(weights_id) and weights_id == self._weights_id
        members = [member for member in self._members if not member.is_excluded]
        engines = [member.engine for member in members if member.engine.healthy()]
        engines = [engine for engine in engines if self._lacks_weights(engine)] if is_repetition else engines
        return {engine.url: engine.receivers for engine in engines}

    def server_count(self) -> int:
        return len(self._members)

    def exclude(self, url: str, cause: str) -> None:
        """Do not use a server again, also after weight updates."""
        for member in self._members:
            if member.engine.url == url:
                member.is_excluded, member.down_until, member.cause = True, math.inf, f"{url} is not believed: {cause}"

    def unreachable(self) -> list[str]:
        return [member.engine.url for member in self._members if not member.engine.healthy()]

    def _apply_outcomes(
        self, calls: Sequence[Future[Any]], members: Sequence[Member], *, is_update: bool = True
    ) -> None:
        """Take engines whose call failed out of rotation; raise if none is left. After an update, put the others in.

        One that is out of rotation is left if it has answered: the next update puts it in.
        """
        failures: list[EngineError] = []
        has_answer = False
        for member, call in zip(members, calls, strict=True):
            failure = call.exception()
            if isinstance(failure, EngineError):
                failures.append(failure)
                member.take_out(failure, self._cooldown_s if isinstance(failure, EngineUnavailableError) else math.inf)
            elif failure is not None:
                raise failure
            else:
                has_answer |= not member.is_excluded
                if is_update:
                    member.put_back()
        if failures and not has_answer and len(self._out_of_rotation()) == len(self._members):
            rejections = [failure for failure in failures if not isinstance(failure, EngineUnavailableError)]
            if len(self._members) == 1 and rejections:
                raise rejections[0]
            kind = EngineError if rejections else EngineUnavailableError
            raise kind("no rollout server is left", found=self._causes()) from (rejections or failures)[0]

    @property
    def server_states(self) -> dict[str, ServerState]:
        """States of the servers by URL, for pools in other processes."""
        return {member.engine.url: member.state for member in self._members}

    @property
    def refusals(self) -> Refusals:
        return {
            (member.engine.url, reason): count
            for member in self._members
            for reason, count in member.refusals.items()
            if count
        }

    def follow_update(self, version: int, weights_id: str) -> None:
        """Hold requests back for an update that another process sends to the servers; samples of it are accepted.

        Where clients stamp samples themselves (`drains`), running requests are aborted and have ended on return.
        """
        engines = [member.engine for member in self._members]
        if any(engine.drains for engine in engines):
            self._loop.run(self._barrier.close(partial(asyncio.to_thread, self.abort)))
        else:
            self._barrier.shut()
        self._version, self._weights_id = version, weights_id
        for engine in engines:
            engine.follow_update(version, weights_id)

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        self._update_members()
        for member in self._members:
            member.follow(states.get(member.engine.url), self._cooldown_s)
        self._barrier.open()

    def sleep(self, level: int = 1) -> None:
        """Free memory on every engine; with level 2, those that can drop their weights do."""
        self._on_all(lambda engine: engine.sleep(level))

    def wake(self) -> None:
        self._on_all(lambda engine: engine.wake())

    def wake_for_update(self) -> None:
        self._on_all(lambda engine: engine.wake_for_update())

    def abort(self) -> None:
        """Abort running requests on every engine, for all of its clients."""
        self._on_all(lambda engine: engine.abort())

    def _on_all(self, command: Callable[[ServedEngine], None]) -> None:
        """Run a command on every engine; one that is out of rotation stays out."""
        members = self._members
        self._apply_outcomes(_side_by_side(command, members), members, is_update=False)

    def close(self) -> None:
        """Close the connections; the servers keep running."""
        super().close()
        for engine in [*self._left, *(member.engine for member in self._members)]:
            engine.close()


def _side_by_side(command: Callable[[ServedEngine], None], members: Sequence[Member]) -> list[Future[None]]:
    with ThreadPoolExecutor(len(members) or 1) as threads:
        return [threads.submit(command, member.engine) for member in members]


def _require_equal(subject: str, facts: Mapping[str, Mapping[str, object]]) -> None:
    """Raise if servers differ in their facts, by URL; the error has those that differ."""
    first = next(iter(facts.values()))
    different = [name for name in first if any(of_server[name] != first[name] for of_server in facts.values())]
    if different:
        of_servers = (
            f"{url}: {', '.join(f'{name} {values[name]}' for name in different)}" for url, values in facts.items()
        )
        raise EngineError(
            f"the servers of a pool have different {subject}",
            expected=f"the same {', '.join(different)}",
            found="; ".join(of_servers),
            remedy="Start all servers with the model of the run",
        )


def _describe(topology: MoeTopology) -> dict[str, object]:
    experts, top_k = [moe.num_experts for moe in topology.moe_layers], [moe.top_k for moe in topology.moe_layers]
    return {
        "model type": topology.model_type or "unknown",
        "number of layers": topology.num_layers,
        "layers with a router": list(topology.layers),
        "experts": experts[0] if len({*experts}) == 1 else experts,
        "top-k": top_k[0] if len({*top_k}) == 1 else top_k,
    }


def _is_empty_abort(sample: Sample) -> bool:
    return sample.finish_reason is FinishReason.ABORT and not len(sample.completion_ids)


# ---- members ---------------------------------------------------------------------------------------------------------


class Member:
    """One engine of the pool, its load, and why and for how long it is not used after a failure.

    down_until   time at which its health is checked again: never, for a quarantined one; None: it is in use
    cause        of its last failure
    is_excluded  it is not used again in this run, not even after a weight update
    refusals     requests whose answer was refused, by `REFUSALS`
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.active_requests = 0
        self.down_until: float | None = None
        self.cause = ""
        self.is_excluded = False
        self.refusals: Counter[str] = Counter()

    def __str__(self) -> str:
        return self.cause if self.engine.url in self.cause else f"{self.engine.url}: {self.cause or 'not reached yet'}"

    @property
    def is_quarantined(self) -> bool:
        """Whether it is excluded until it accepts the next weight update."""
        return self.down_until == math.inf

    def take_out(self, cause: BaseException, cooldown_s: float) -> None:
        """Do not use the engine for a while; `math.inf`: until it has taken new weights."""
        if self.is_quarantined:
            return
        self.down_until, self.cause = time.monotonic() + cooldown_s, one_line(cause)
        if self.is_quarantined:
            logger.warning("rollout server quarantined until its next weight update: %s", self)

    def refuse(self, error: EngineAnswerError) -> None:
        """Quarantine the engine because of an answer."""
        self.refusals["answer"] += 1
        self.take_out(error, math.inf)

    def put_back(self) -> None:
        """Use the engine again, unless it is excluded."""
        if not self.is_excluded:
            self.down_until, self.cause = None, ""

    @property
    def state(self) -> ServerState:
        """State for other pools of the same server."""
        cause = "" if self.down_until is None else self.cause or "not reached yet"
        return ServerState(cause, self.is_quarantined)

    def follow(self, state: ServerState | None, cooldown_s: float) -> None:
        """Use the engine, or do not, as another pool does; None: that one does not have it."""
        self.put_back()
        if state is None:
            self.take_out(EngineUnavailableError("it was not updated"), cooldown_s)
            return
        if state.cause:
            self.take_out(EngineError(state.cause), math.inf if state.is_quarantined else cooldown_s)

    @contextmanager
    def request(self, cooldown_s: float) -> Iterator[ServedEngine]:
        """Run a request on this engine; take it out of rotation if it is unavailable or its answer cannot be used."""
        self.active_requests += 1
        try:
            yield self.engine
        except EngineUnavailableError as failure:
            self.refusals["foreign_weights"] += isinstance(failure, ForeignWeightsError)
            self.take_out(failure, cooldown_s)
            raise
        except EngineAnswerError as error:
            self.refuse(error)
            raise
        finally:
            self.active_requests -= 1


def _joined(engine: ServedEngine) -> Member:
    logger.warning("rollout server joined: %s", engine.url)
    member = Member(engine)
    member.take_out(EngineUnavailableError("it has joined, and has no weights yet"), 0.0)
    return member
