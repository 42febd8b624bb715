"""Transports of weights: one object for each way from the trainer's ranks to the engine, with one method, `send`.

http   tensors in the requests to the engine, through rank 0's host memory
ipc    memory of the trainer's ranks that the engine's workers open, on the same devices
nccl   one broadcast from rank 0 to all workers of all engines; over gloo on CPUs

Experts that are divided among ranks (`DividedSource`) are handed over by the ranks that hold them, with ipc and nccl.

Collective: construct a transport and call `send` on every rank; the engine exists on rank 0 only.

Retries. A transfer (ipc, nccl) is all or nothing: its store holds the first failure, which ends it for every worker,
since they share a broadcast or a barrier. So one lost server would fail the update of all. If a transfer fails and
rank 0 can tell which servers failed it, the same weights are sent once more, under the same version and id, to the
servers that are left; the pool keeps the failed ones out of rotation and sends them the weights again once they answer.
A second failure, or one that no server is to blame for, ends the update. All ranks read the source to its end even
then, because gathering the weights is collective, and all ranks learn from rank 0 what happens next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol, get_args

import torch

from moe_replay.distributed.network import LOOPBACK, address_seen_by
from moe_replay.distributed.ranks import all_gather_json, from_rank_0, raise_on_all_ranks, rank
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.utils.misc import one_line
from moe_replay.weights.identity import Probe
from moe_replay.weights.messages import TransferKind
from moe_replay.weights.sender import DividedSender, HandOver, Rendezvous, WeightSender
from moe_replay.weights.source import DividedSource, Group, HandedGroup, Weights, WeightSource, owners_of
from moe_replay.weights.transfer import Receivers, Transfer, TransferError, TransferStore

ANY_ADDRESS = "0.0.0.0"
UPDATING = "updating the weights of the engine"
Targets = Mapping[str, Receivers]
"""Workers that take part in a transfer, by the URL of their engine; "": an engine of this process."""


class WeightTarget(Protocol):
    """The engine of a run, as transports see it."""

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Replace all weights by tensors or a folder."""

    def receive_weights(self, transfer: Transfer, version: int, probe: Probe | None = None) -> None: ...

    def transfer_targets(self, version: int) -> Targets | None:
        """Return the workers that would take part in a transfer; None if an engine takes no transfers."""

    def unreachable(self) -> list[str]:
        """Return the URLs of the servers that do not answer."""

    def bytes_sent(self) -> int | None:
        """Return the bytes that the last update sent to a server; None: not known."""


class Transport(Protocol):
    """One way of the policy's weights to the engine.

    Collective: construct it and call `send` on every rank; the engine exists on rank 0 only.
    """

    def send(self, source: WeightSource, engine: WeightTarget | None, version: int, probe: Probe | None) -> int:
        """Send all weights and return the bytes that an engine was sent; every rank reads all groups of the source."""


class Choice(NamedTuple):
    """The transport of an update, and why."""

    transport: str
    reason: str


def choose_transport(configured: str, trainer: str, devices: set[str], targets: Targets | None) -> Choice:
    """Return the transport to use; raise if the configured one cannot be.

    trainer   type of the ranks' devices
    devices   ids of all of them
    targets   workers of the engines; None: an engine takes tensors in requests only
    """
    if configured == "http":
        return Choice(configured, "as configured")
    if targets == {}:
        return Choice("http", "there is no server to send them to")
    if targets is None:
        if configured == "auto":
            return Choice("http", "the engine takes no other transport")
        raise EngineError(
            f"weight_sync.transport = {configured!r}, and the engine takes tensors in requests only",
            remedy='Set weight_sync.transport = "auto"',
        )
    types = {receivers.device for receivers in targets.values()} | {trainer}
    are_shared = [name in devices for receivers in targets.values() for name in receivers.ids]
    if configured == "ipc" and not all(are_shared):
        raise EngineError(
            'weight_sync.transport = "ipc", and a worker of the engine is on a device that no rank of the trainer uses',
            remedy='Set weight_sync.transport = "nccl" or "auto"',
        )
    if configured == "nccl" and types == {"cuda"} and any(are_shared):
        raise EngineError(
            'weight_sync.transport = "nccl", and an engine worker is on a trainer GPU, which NCCL does not allow',
            remedy='Set weight_sync.transport = "ipc" or "auto"',
        )
    if configured in TRANSFERS:
        if len(types) > 1:
            raise EngineError(
                f"weight_sync.transport = {configured!r} needs trainer and engine on one type of device",
                found=", ".join(types),
            )
        if not types <= {"cuda", "cpu"}:
            raise EngineError(
                f"weight_sync.transport = {configured!r} needs CUDA GPUs, or CPUs",
                found=", ".join(types),
                remedy='Set it to "auto"',
            )
        return Choice(configured, "as configured")
    if types != {"cuda"}:
        return Choice("http", "trainer and engine are not both on CUDA GPUs")
    if all(are_shared):
        return Choice("ipc", "trainer and engine share their GPUs")
    if any(are_shared):
        return Choice("http", "some workers are on GPUs of the trainer and some are not")
    return Choice("nccl", "the engine has its own GPUs")


class HttpTransport:
    """Tensors in the requests to the engine.

    copies   the trainer's memory is freed after the last tensor: an engine that reads tensors gets copies of them
    """

    def __init__(self, *, copies: bool = False) -> None:
        self._copies = copies

    def send(self, source: WeightSource, engine: WeightTarget | None, version: int, probe: Probe | None) -> int:
        groups = ByteCounter(source.groups())
        tensors = ((name, tensor.clone() if self._copies else tensor) for group in groups for name, tensor in group)
        with raise_on_all_ranks(UPDATING):
            try:
                if engine is not None:
                    engine.update_weights(tensors, version, probe)
            finally:
                groups.exhaust()
        sent = None if engine is None else engine.bytes_sent()
        return groups.nbytes if sent is None else sent


class TransferFailedError(EngineError):
    """A transfer that has failed on every rank, after which another transport is tried."""


class TransferTransport:
    """Weights outside of the request.

    kind          ipc: memory of the trainer's ranks that the engine's workers open, on the same devices
                  nccl: broadcasts to all workers of all engines, from rank 0, or from each owner of experts
    device        of this rank
    devices       ids of the devices of all ranks
    chunk_bytes   size of the staging buffer
    timeout_s     longest time without progress
    falls_back    after a failure raise `TransferFailedError` on every rank: another transport is tried
    """

    def __init__(
        self,
        kind: TransferKind,
        device: torch.device,
        devices: list[str],
        *,
        chunk_bytes: int,
        timeout_s: float,
        falls_back: bool = False,
    ) -> None:
        self.kind, self.device, self.devices = kind, device, devices
        self.chunk_bytes, self.timeout_s, self.falls_back = chunk_bytes, timeout_s, falls_back

    def send(
        self,
        source: WeightSource,
        engine: WeightTarget | None,
        version: int,
        probe: Probe | None,
        targets: Targets | None = None,
    ) -> int:
        """Send all weights; if some servers fail, once more to the others.

        targets   on rank 0, those of `engine`; None: read from it
        """
        attempt = _Attempt(self, engine, version, targets)
        nbytes = attempt.run(source, probe)
        if nbytes is None:
            again = _Attempt(self, engine, version, attempt.remaining, is_last=True)
            nbytes = again.run(source, probe)
        assert nbytes is not None, "the last attempt returns or raises"
        return nbytes


TRANSFERS: tuple[str, ...] = get_args(TransferKind)


class _Attempt:
    """One attempt of a transfer (see the retries above). Collective.

    targets     on rank 0
    is_last     no other attempt follows
    remaining   after an attempt that failed, on rank 0: the targets that did not
    """

    def __init__(
        self,
        transport: TransferTransport,
        engine: WeightTarget | None,
        version: int,
        targets: Targets | None,
        *,
        is_last: bool = False,
    ) -> None:
        self._transport, self._engine, self._version = transport, engine, version
        self._targets, self._is_last = targets, is_last
        self._hosts: dict[str, str] = {}
        self._store: TransferStore | None = None
        self._failed: set[str] = set()  # engines whose worker ended it
        self.remaining: Targets = {}
        self._hand_over: HandOver | None = None
        self._nbytes: int | None = None  # that rank 0 has seen on their way from all ranks
        self._shared = from_rank_0(self._open_store, "preparing an update of the engine's weights")

    def _open_store(self) -> dict[str, Any]:
        """Open the store of the transfer, and return how to reach it; on rank 0."""
        if self._targets is None and self._engine is not None:
            self._targets = self._engine.transfer_targets(self._version)
        if not self._targets:
            raise EngineUnavailableError(f"no engine takes weights by {self._transport.kind}")
        # Servers may see this machine under different addresses; then the store listens on all of them.
        self._hosts = {url: address_seen_by(url) for url in self._targets}
        addresses = set(self._hosts.values())
        only = next(iter(addresses)) if len(addresses) == 1 else None
        self._store = TransferStore.listen(only or ANY_ADDRESS, self._transport.timeout_s)
        devices = [name for receivers in self._targets.values() for name in receivers.ids]
        return {
            "host": only or LOOPBACK,
            "port": self._store.port,
            "token": self._store.token,
            "workers": len(devices),
            "opens": {name: sorted(opened) for name, opened in _opened(self._targets).items()},
        }

    def _meet(self, source: WeightSource) -> Rendezvous:
        """Return who takes part."""
        shared, transport = self._shared, self._transport
        opens = shared["opens"] if transport.kind == "ipc" else {}
        # Rank 0 broadcasts, or sends the messages; by ipc one rank for each device of a worker has memory on it.
        ranks = tuple(sorted({0, *map(transport.devices.index, opens)}))
        if owners := owners_of(source):
            self._hand_over = HandOver.between(transport.devices, opens, ranks)
            ranks = tuple(sorted({*ranks, *owners}))
        return Rendezvous(
            *(transport.kind, shared["host"], shared["port"], shared["token"], ranks),
            *(shared["workers"], transport.chunk_bytes, transport.timeout_s),
        )

    def _groups(self, source: WeightSource) -> Iterator[Group] | Iterator[HandedGroup]:
        if self._hand_over is None:
            return source.groups(self._rendezvous.ranks)
        assert isinstance(source, DividedSource)
        return source.owned_groups(self._hand_over.receivers, self._hand_over.holders, parts=True)

    def run(self, source: WeightSource, probe: Probe | None) -> int | None:
        """Return the bytes that were sent to an engine; None if servers have failed and others are left."""
        self._rendezvous = self._meet(source)
        groups = ByteCounter(self._groups(source))
        verdict = ""
        with raise_on_all_ranks(UPDATING):
            try:
                self._transfer(groups, probe)
            except EngineError as failure:
                if self._engine is not None:
                    verdict = self._next_step(self._engine)
                # Other ranks notice a broken transfer too, but only rank 0 knows the cause and what follows.
                if not verdict and not (self._engine is None and isinstance(failure, TransferError)):
                    raise
                verdict = verdict and f"{verdict} {one_line(failure)}"
        next_step, _, cause = all_gather_json(verdict)[0].partition(" ")
        if next_step == "fall_back":
            raise TransferFailedError(cause)
        return None if next_step else groups.nbytes if self._nbytes is None else self._nbytes

    def _next_step(self, engine: WeightTarget) -> str:
        """Return what follows a failed transfer: "retry" with the other servers, "fall_back", or "" for an error."""
        targets = self._targets or {}
        if not self._is_last and "" not in targets:
            alive = engine.transfer_targets(self._version) or {}
            failed = self._failed | {url for url in targets if url not in alive}
            self.remaining = {url: receivers for url, receivers in targets.items() if url not in failed}
            if failed and self.remaining:
                return "retry"
        return "fall_back" if self._transport.falls_back else ""

    def _transfer(self, groups: ByteCounter, probe: Probe | None) -> None:
        if rank() not in self._rendezvous.ranks:
            groups.exhaust()
            return
        common = (self._rendezvous, rank(), self._transport.device, groups, self._store)
        sender = WeightSender(*common) if self._hand_over is None else DividedSender(*common, hand_over=self._hand_over)
        with ExitStack() as undo:
            undo.push(partial(self._break_off, sender, groups))
            if self._engine is None:
                sender.assist()
            else:
                assert self._targets is not None
                transfer = sender.transfer(self._targets, self._hosts)
                self._engine.receive_weights(transfer, self._version, probe)
                if transfer.failure is not None:
                    raise transfer.failure
            undo.pop_all()
        if self._engine is not None and self._hand_over is not None:
            self._nbytes = sender.bytes_sent
        sender.close()

    def _break_off(
        self,
        sender: WeightSender,
        groups: ByteCounter,
        kind: type | None,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        self._failed = sender.failed_engines()
        sender.fail("broke off" if error is None else one_line(error))
        if isinstance(error, Exception):  # else this process is ending, and must not wait for the others
            groups.exhaust()


def _opened(targets: Targets) -> dict[str, set[str]]:
    """Return the devices whose memory the workers on each device can open."""
    opened: dict[str, set[str]] = {}
    for receivers in targets.values():
        for name in receivers.ids:
            opened[name] = opened.get(name, {*receivers.opens}) & {*receivers.opens}
    return opened


class ByteCounter:
    """Groups of weights, with the bytes that have been read on this rank."""

    def __init__(self, groups: Iterator[Group] | Iterator[HandedGroup]) -> None:
        self._groups = groups
        self.nbytes = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        group = next(self._groups)
        tensors = group.tensors if isinstance(group, HandedGroup) else group
        self.nbytes += sum(tensor.nbytes for _, tensor in tensors)
        return group

    def exhaust(self) -> None:
        """Read the remaining groups: gathering weights is collective."""
        for _ in self:
            pass
