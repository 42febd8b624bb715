"""Transports of weights: one object for each way from the trainer's ranks to the engine, with one method, `send`.

http   tensors in the requests to the engine, through rank 0's host memory
ipc    memory of the trainer's ranks that the engine's workers open, on the same devices
nccl   one broadcast from rank 0 to all workers of all engines; over gloo on CPUs

Collective: construct a transport and call `send` on every rank; the engine exists on rank 0 only.

Retries. A transfer (ipc, nccl) is all or nothing: its store holds the first failure, which ends it for every worker,
since they share a broadcast or a barrier. So one lost server would fail the update of all. If a transfer fails and
rank 0 can tell which servers failed it, the same weights are sent once more, under the same version and id, to the
servers that are left; the pool keeps the failed ones out of rotation and sends them the weights again once they answer.
A second failure, or one that no server is to blame for, ends the update. All ranks read the source to its end even
then, because gathering the weights is collective, and all ranks learn from rank 0 what happens next.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import ClassVar, NamedTuple, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from moe_replay.distributed.network import LOOPBACK, address_towards
from moe_replay.distributed.ranks import all_gather_text, from_rank_0, raise_on_all_ranks, rank
from moe_replay.errors import EngineError, EngineUnavailableError, MoeReplayError
from moe_replay.utils.misc import one_line
from moe_replay.weights.messages import BufferHandle, ChunkMessage, TransferKind, TransferSettings
from moe_replay.weights.probe import Probe
from moe_replay.weights.source import Group, Weights, WeightSource
from moe_replay.weights.staging import StagingBuffer, aligned, describe, device_id, fill
from moe_replay.weights.transfer import (
    BroadcastGroup,
    Receivers,
    Transfer,
    TransferError,
    TransferStore,
    end_message,
)

ANY_ADDRESS = "0.0.0.0"
UPDATING = "updating the weights of the engine"
Targets = Mapping[str, Receivers]
"""Workers that take part in a transfer, by the URL of their engine; "": an engine of this process."""


class WeightTarget(Protocol):
    """The engine of a run, as transports see it."""

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Replace all weights by tensors or a folder."""
        ...

    def receive_weights(self, transfer: Transfer, version: int, probe: Probe | None = None) -> None: ...

    def transfer_targets(self, version: int) -> Targets | None:
        """Return the workers that would take part in a transfer; None if an engine takes no transfers."""
        ...

    def unreachable(self) -> list[str]:
        """Return the URLs of the servers that do not answer."""
        ...

    def bytes_sent(self) -> int | None:
        """Return the bytes that the last update sent to a server; None: not known."""
        ...


class Transport(Protocol):
    """One way of the policy's weights to the engine.

    Collective: construct it and call `send` on every rank; the engine exists on rank 0 only.
    """

    def send(self, source: WeightSource, engine: WeightTarget | None, version: int, probe: Probe | None) -> int:
        """Send all weights and return the bytes that an engine was sent; every rank reads all groups of the source."""
        ...


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


class _TransferTransport(ABC):
    """Weights outside of the request, by memory that both processes open or by a broadcast.

    device        of this rank
    devices       ids of the devices of all ranks
    chunk_bytes   size of the staging buffer
    timeout_s     longest time without progress
    falls_back    after a failure raise `TransferFailedError` on every rank: another transport is tried
    """

    kind: ClassVar[TransferKind]

    def __init__(
        self,
        device: torch.device,
        devices: list[str],
        *,
        chunk_bytes: int,
        timeout_s: float,
        falls_back: bool = False,
    ) -> None:
        self.device, self.devices = device, devices
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

        targets   on rank 0, those of `engine`; None: it is asked for them
        """
        attempt = _Attempt(self, engine, version, targets)
        nbytes = attempt.run(source, probe)
        if nbytes is None:
            again = _Attempt(self, engine, version, attempt.remaining, is_last=True)
            nbytes = again.run(source, probe)
        assert nbytes is not None, "the last attempt returns or raises"
        return nbytes

    @abstractmethod
    def sending_ranks(self, receiving: list[str]) -> tuple[int, ...]:
        """Return the ranks that hand weights over to workers on these devices."""


class NcclTransport(_TransferTransport):
    """One broadcast from rank 0 to all workers of all engines; over gloo on CPUs."""

    kind = "nccl"

    def sending_ranks(self, receiving: list[str]) -> tuple[int, ...]:
        """Return rank 0, which broadcasts."""
        return (0,)


class IpcTransport(_TransferTransport):
    """Memory of the trainer's ranks that the engine's workers open, on the same devices."""

    kind = "ipc"

    def sending_ranks(self, receiving: list[str]) -> tuple[int, ...]:
        """Return rank 0, which sends the messages, and one rank for each device of a worker."""
        return tuple(sorted({0, *(self.devices.index(name) for name in receiving)}))


TRANSFERS: Mapping[str, type[_TransferTransport]] = {"ipc": IpcTransport, "nccl": NcclTransport}


class _Attempt:
    """One attempt of a transfer (see the retries above). Collective.

    targets     on rank 0
    is_last     no other attempt follows
    remaining   after an attempt that failed, on rank 0: the targets that did not
    """

    def __init__(
        self,
        transport: _TransferTransport,
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
        self.failed: set[str] = set()
        self.remaining: Targets = {}
        prepared = from_rank_0(self._open_store, "preparing an update of the engine's weights")
        self._rendezvous = Rendezvous.from_json(prepared, transport)

    def _open_store(self) -> str:
        """Open the store of the transfer, and return how to reach it; on rank 0."""
        if self._targets is None and self._engine is not None:
            self._targets = self._engine.transfer_targets(self._version)
        if not self._targets:
            raise EngineUnavailableError(f"no engine takes weights by {self._transport.kind}")
        # Servers may see this machine under different addresses; then the store listens on all of them.
        self._hosts = {url: _address_seen_by(url) for url in self._targets}
        addresses = set(self._hosts.values())
        only = next(iter(addresses)) if len(addresses) == 1 else None
        self._store = TransferStore.listen(only or ANY_ADDRESS, self._transport.timeout_s)
        devices = [name for receivers in self._targets.values() for name in receivers.ids]
        return json.dumps(
            {
                "host": only or LOOPBACK,
                "port": self._store.port,
                "token": self._store.token,
                "workers": len(devices),
                "devices": sorted({*devices}),
            }
        )

    def run(self, source: WeightSource, probe: Probe | None) -> int | None:
        """Return the bytes that were sent to an engine; None if servers have failed and others are left."""
        groups = ByteCounter(source.groups(self._rendezvous.ranks))
        verdict = ""
        with raise_on_all_ranks(UPDATING):
            try:
                self._transfer(groups, probe)
            except EngineError as failure:
                if self._engine is not None:
                    verdict = self._next_step()
                # Other ranks notice a broken transfer too, but only rank 0 knows the cause and what follows.
                if not verdict and not (self._engine is None and isinstance(failure, TransferError)):
                    raise
                verdict = verdict and f"{verdict} {one_line(failure)}"
        next_step, _, cause = all_gather_text(verdict)[0].partition(" ")
        if next_step == "fall_back":
            raise TransferFailedError(cause)
        return None if next_step else groups.nbytes

    def _next_step(self) -> str:
        """Return what follows a failed transfer: "retry" with the other servers, "fall_back", or "" for an error."""
        if self._others_remain():
            return "retry"
        return "fall_back" if self._transport.falls_back else ""

    def _others_remain(self) -> bool:
        if self._is_last or self._targets is None or "" in self._targets or self._engine is None:
            return False
        alive = self._engine.transfer_targets(self._version) or {}
        failed = self.failed | {url for url in self._targets if url not in alive}
        self.remaining = {url: receivers for url, receivers in self._targets.items() if url not in failed}
        return bool(failed) and bool(self.remaining)

    def _transfer(self, groups: ByteCounter, probe: Probe | None) -> None:
        if rank() not in self._rendezvous.ranks:
            groups.exhaust()
            return
        sender = WeightSender(self._rendezvous, rank(), self._transport.device, groups, self._store)
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
        sender.close()

    def _break_off(
        self,
        sender: WeightSender,
        groups: ByteCounter,
        kind: type | None,
        error: BaseException | None,
        traceback: object,
    ) -> None:
        self.failed = sender.failed_engines()
        sender.fail("broke off" if error is None else one_line(error))
        if isinstance(error, Exception):  # else this process is ending, and must not wait for the others
            groups.exhaust()


def _address_seen_by(url: str) -> str:
    """Return the address of this machine that a server sees; the loopback for an engine of this process."""
    host = urlsplit(url).hostname
    return LOOPBACK if host is None else address_towards(host)


class ByteCounter:
    """Groups of weights, with the bytes that have been read on this rank."""

    def __init__(self, groups: Iterator[Group]) -> None:
        self._groups = groups
        self.nbytes = 0

    def __iter__(self) -> Iterator[Group]:
        return self

    def __next__(self) -> Group:
        group = next(self._groups)
        self.nbytes += sum(tensor.nbytes for _, tensor in group)
        return group

    def exhaust(self) -> None:
        """Read the remaining groups: gathering weights is collective."""
        for _ in self:
            pass


# ---- the sending end -------------------------------------------------------------------------------------------------


class Rendezvous(NamedTuple):
    """Rendezvous of the trainer's ranks and the engines' workers for one transfer.

    token   that everyone who takes part has
    ranks   of the trainer that have the weights: with `ipc`, one for each device of the workers
    """

    kind: TransferKind
    host: str
    port: int
    token: str
    ranks: tuple[int, ...]
    workers: int
    chunk_bytes: int
    timeout_s: float

    @classmethod
    def from_json(cls, prepared: str, transport: _TransferTransport) -> Rendezvous:
        """Return the rendezvous that rank 0 has prepared."""
        shared = json.loads(prepared)
        ranks, kind = transport.sending_ranks(shared["devices"]), transport.kind
        return cls(
            *(kind, shared["host"], shared["port"], shared["token"], ranks),
            *(shared["workers"], transport.chunk_bytes, transport.timeout_s),
        )


class WeightSender:
    """One rank's part in one transfer.

    groups   the weights on this rank, as `WeightSource.groups` yields them for the ranks of the rendezvous
    store    of the rendezvous, on rank 0, which holds it; other ranks connect
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        device: torch.device,
        groups: Iterator[Group],
        store: TransferStore | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self.bytes_sent = 0
        self._rank, self._device, self._groups = rank, device, groups
        self._store = store or TransferStore.connect(
            rendezvous.host, rendezvous.port, rendezvous.token, rendezvous.timeout_s
        )
        self._buffer: StagingBuffer | None = None
        self._buffers = self._announced = 0  # so far, and of which the engines know
        self._group: BroadcastGroup | None = None
        self._check: Callable[[], None] | None = None
        self._urls: list[str] = []  # of the engine of each worker
        self._open: Generator[str] | None = None

    # ---- rank 0 -------------------------------------------------------------------------------------------------

    def transfer(self, engines: Mapping[str, Receivers], hosts: Mapping[str, str] | None = None) -> Transfer:
        """Return the transfer for the engines' `receive_weights`; its messages must be read in this thread. On rank 0.

        hosts   address of this machine as each engine sees it, where that is not the rendezvous's
        """
        settings, first = {}, 0
        rendezvous = self.rendezvous
        for url, receivers in engines.items():
            settings[url] = TransferSettings(
                kind=rendezvous.kind,
                host=(hosts or {}).get(url, rendezvous.host),
                port=rendezvous.port,
                token=rendezvous.token,
                first=first,
                workers=rendezvous.workers,
                timeout_s=rendezvous.timeout_s,
            )
            self._urls += [url] * len(receivers.ids)
            first += len(receivers.ids)
        transfer = Transfer(settings, ())
        self._check = lambda: _check_running(transfer)
        transfer.messages = self._open = self._messages()
        return transfer

    def _messages(self) -> Generator[str]:
        try:
            yield from self._chunks()
        except MoeReplayError as failure:
            with suppress(TransferError):
                self._store.fail(one_line(failure))  # before engines hear of it in another way
            raise

    def _chunks(self) -> Iterator[str]:
        rendezvous, number = self.rendezvous, -1
        self._wait("ready", rendezvous.workers, "engines joined the transfer")
        self._store.put("go", "go")
        if rendezvous.kind == "nccl":
            self._group = BroadcastGroup(self._store, 0, rendezvous.workers + 1, self._device.type, check=self._check)
        for number, infos in enumerate(fill(self._groups, self._room, rendezvous.chunk_bytes)):
            handles = self._packed(number)
            buffer = self._current()
            nbytes = sum(aligned(info.nbytes) for info in infos)
            yield ChunkMessage(
                number=number,
                nbytes=nbytes,
                capacity=buffer.numel(),
                tensors=describe(infos),
                handles=handles,
            ).model_dump_json(exclude_defaults=True)
            if self._group is not None:
                self._group.broadcast(buffer[:nbytes], self._check)
            else:
                self._read_by_all(number)
            self.bytes_sent += sum(info.nbytes for info in infos)
        yield end_message(number + 1)

    # ---- other ranks --------------------------------------------------------------------------------------------

    def assist(self) -> None:
        """Hand over this rank's copy of each chunk while rank 0 sends the messages."""
        for number, infos in enumerate(fill(self._groups, self._room, self.rendezvous.chunk_bytes)):
            self._packed(number)
            self._read_by_all(number)
            self.bytes_sent += sum(info.nbytes for info in infos)

    # ---- both ---------------------------------------------------------------------------------------------------

    def _room(self, nbytes: int) -> Tensor:
        """Return the buffer, replaced if it is too small."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = StagingBuffer(self._device, nbytes, shared=self.rendezvous.kind == "ipc")
            if self.rendezvous.kind == "ipc":
                handle = self._buffer.handle().model_dump_json()
                self._store.put(f"handle/{self._buffers}/{self._rank}", f"{device_id(self._device)}\n{handle}")
            self._buffers += 1
        return self._buffer.bytes

    def _current(self) -> Tensor:
        assert self._buffer is not None
        return self._buffer.bytes

    def _packed(self, number: int) -> dict[str, BufferHandle]:
        """Wait until every rank has filled its buffer; return the handles on rank 0 if they are new."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self.rendezvous.kind != "ipc":
            return {}
        self._store.add(f"packed/{number}")
        if self._rank != 0:
            return {}
        self._wait(f"packed/{number}", len(self.rendezvous.ranks), "other ranks filled their buffers")
        if self._announced == self._buffers:
            return {}
        self._announced = self._buffers
        handles = [self._store.get(f"handle/{self._buffers - 1}/{rank}") for rank in self.rendezvous.ranks]
        parts = [text.partition("\n") for text in handles if text is not None]
        return {device: BufferHandle.model_validate_json(handle) for device, _, handle in parts}

    def _read_by_all(self, number: int) -> None:
        """Wait until every worker has loaded a chunk: the buffer is overwritten next."""
        self._wait(f"done/{number}", self.rendezvous.workers, "engines loaded weights")

    def _wait(self, key: str, count: int, doing: str) -> None:
        self._store.wait(lambda: self._store.add(key, 0) >= count, doing, self._check)

    def failed_engines(self) -> set[str]:
        """Return the engine whose worker ended the transfer, if one did."""
        with suppress(TransferError):
            failure = self._store.failure()
            if failure is not None and failure["worker"] is not None and self._urls:
                return {self._urls[failure["worker"]]}
        return set()

    def fail(self, text: str) -> None:
        """Fail the transfer for all workers, and leave it."""
        with suppress(TransferError):  # rank 0 is gone
            self._store.fail(text)
        self.close()

    def close(self) -> None:
        """Free the buffer and leave."""
        # Nobody reads on after the last message, so the generator still refers to the buffer, and is part of a cycle:
        # without this the memory of every update would be kept until Python collects garbage.
        if self._open is not None and inspect.getgeneratorstate(self._open) != inspect.GEN_RUNNING:
            self._open.close()
        self._open = self._check = None
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


def _check_running(transfer: Transfer) -> None:
    """Raise if an engine has ended its update before the last message."""
    ended = transfer.ended()
    if ended:
        raise TransferError("; ".join(f"{url or 'the engine'}: {why}" for url, why in ended.items()))
