"""How the policy's weights reach the engine: which kind is used, one update by it, and what that took.

http   tensors in the request itself, by way of rank 0's host memory
ipc    memory of the trainer's ranks that the engine's workers open, on the same devices
nccl   one broadcast from rank 0 to all workers of all engines; over gloo where they are on CPUs
any other kind   a `WeightSync` of its own (`weight_kinds.py`): those of vLLM (`VllmSync`), or a class of the user's
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from moe_replay.distributed.ranks import all_gather_text, from_rank_0, raise_on_all_ranks, rank
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.rollout.types import Probe
from moe_replay.rollout.weights.sender import Rendezvous, WeightSender
from moe_replay.rollout.weights.source import Group, WeightSource
from moe_replay.rollout.weights.staging import device_id
from moe_replay.rollout.weights.transfer import Receivers, TransferError, TransferStore
from moe_replay.rollout.weights.transfer_messages import TRANSFER_KINDS, TransferKind
from moe_replay.train.config.weights_section import WeightsConfig
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.weight_kinds import WEIGHT_KINDS, WeightSync, load_sync
from moe_replay.utils.messages import one_line
from moe_replay.utils.plugins import user_code

LOOPBACK, ANY = "127.0.0.1", "0.0.0.0"
Targets = Mapping[str, Receivers]


class SyncReport(NamedTuple):
    """Cost of an update of the engine's weights, the probe included.

    reason   why weights went this way
    nbytes   that were sent to an engine: tensors, or their changes; of several engines, the most to any
    """

    kind: str
    reason: str
    seconds: float
    nbytes: int

    def metrics(self) -> dict[str, float]:
        """Return seconds, gigabytes, and gigabytes per second."""
        gigabytes = self.nbytes / 1e9
        rate = gigabytes / max(self.seconds, 1e-9)
        return {"time/weights": self.seconds, "weights/gb": gigabytes, "time/weights_gb_per_second": rate}


class Choice(NamedTuple):
    """The kind of an update, and why."""

    kind: str
    reason: str


def choose_kind(wanted: str, trainer: str, devices: set[str], targets: Targets | None) -> Choice:
    """Return the kind to use; raise if the wanted one cannot be.

    trainer   type of the ranks' devices
    devices   ids of all of them
    targets   workers of the engines; None: an engine takes tensors in requests only
    """
    if wanted == "http":
        return Choice(wanted, "as configured")
    if targets == {}:
        return Choice("http", "there is no server to send them to")
    if targets is None:
        if wanted == "auto":
            return Choice("http", "the engine takes no other kind")
        raise EngineError(
            f"weights.kind = {wanted!r}, and the engine takes tensors in requests only",
            remedy='Set weights.kind = "auto"',
        )
    types = {one.device for one in targets.values()} | {trainer}
    shared = all(name in devices for one in targets.values() for name in one.ids)
    if wanted == "ipc" and not shared:
        raise EngineError(
            'weights.kind = "ipc", and a worker of the engine is on a device that no rank of the trainer uses',
            remedy='Set weights.kind = "nccl" or "auto"',
        )
    if wanted == "nccl" and types == {"cuda"} and any(name in devices for one in targets.values() for name in one.ids):
        raise EngineError(
            'weights.kind = "nccl", and a worker of the engine is on a GPU of the trainer, which NCCL does not allow',
            remedy='Set weights.kind = "ipc" or "auto"',
        )
    if wanted in TRANSFER_KINDS:
        if len(types) > 1:
            raise EngineError(
                f"weights.kind = {wanted!r} needs trainer and engine on one type of device", found=", ".join(types)
            )
        if not types <= {"cuda", "cpu"}:
            raise EngineError(
                f"weights.kind = {wanted!r} needs CUDA GPUs, or CPUs", found=", ".join(types), remedy='Set it to "auto"'
            )
        return Choice(wanted, "as configured")
    if types != {"cuda"}:
        return Choice("http", "trainer and engine are not both on CUDA GPUs")
    if shared:
        return Choice("ipc", "trainer and engine share their GPUs")
    if any(name in devices for one in targets.values() for name in one.ids):
        return Choice("http", "some workers are on GPUs of the trainer and some are not")
    return Choice("nccl", "the engine has its own GPUs")


class EngineSync:
    """Updates the engine of a run. All ranks make it and call `send`; rank 0 alone has the engine.

    copies   the trainer's memory is freed after the last tensor: an engine that reads tensors gets copies of them
    """

    def __init__(self, config: WeightsConfig, device: torch.device, *, copies: bool = False) -> None:
        self._config, self._device, self._copies = config, device, copies
        self._devices: list[str] | None = None  # of all ranks
        self._fallback = ""
        self._own = load_sync(config.kind, config)

    def send(self, source: WeightSource, engine: SyncedEngine | None, version: int, probe: Probe | None) -> SyncReport:
        """Send all weights; if some servers fail in a transfer, once more to the others.

        A transfer that `auto` has chosen and that fails is followed by `http`, for the rest of the run.
        """
        began = time.monotonic()
        if self._own is not None:
            nbytes = self._send_by(self._own, source, engine, version, probe)
            return SyncReport(self._config.kind, "as configured", time.monotonic() - began, nbytes)
        if self._devices is None:
            self._devices = all_gather_text(device_id(self._device))
        failed: set[str] = set()
        while True:
            attempt = _Attempt(self._config, self._device, self._devices, engine, version, failed)
            nbytes = attempt.run(source, probe, self._copies)
            if nbytes is not None:
                kind, reason = attempt.choice
                return SyncReport(kind, self._fallback or reason, time.monotonic() - began, nbytes)
            failed |= attempt.failed
            if attempt.next_try == "http":
                self._fallback = f"{attempt.choice.kind} has failed: {attempt.cause}"
                self._config = self._config.model_copy(update={"kind": "http"})

    def _send_by(
        self, sync: WeightSync, source: WeightSource, engine: SyncedEngine | None, version: int, probe: Probe | None
    ) -> int:
        if self._config.kind in WEIGHT_KINDS:
            return sync.send(source, engine, version, probe)
        name = f"kind of weight updates {self._config.kind!r}"
        with raise_on_all_ranks("updating the weights of the engine"), user_code(name, EngineError):
            return sync.send(source, engine, version, probe)


class _Attempt:
    """One try to update the engines.

    without   servers that have failed before
    failed    servers that have failed in this one, after `run`
    next_try  after one that failed: "others" without the failed servers, or "http"; `cause` says why
    """

    def __init__(
        self,
        config: WeightsConfig,
        device: torch.device,
        devices: list[str],
        engine: SyncedEngine | None,
        version: int,
        without: set[str],
    ) -> None:
        self._config, self._device, self._devices = config, device, devices
        self._engine, self._version = engine, version
        self._targets: Targets | None = None
        self._store: TransferStore | None = None
        self._hosts: dict[str, str] = {}
        self._is_first = not without
        self.failed: set[str] = set()
        self.next_try = self.cause = ""
        told = json.loads(from_rank_0(lambda: self._prepare(without), "preparing an update of the engine's weights"))
        self.choice = Choice(told.pop("kind"), told.pop("reason"))
        self._told: dict[str, Any] = told

    def _prepare(self, without: set[str]) -> str:
        """Choose the kind and open the store of a transfer; on rank 0."""
        targets = None if self._engine is None else self._engine.transfer_targets(self._version)
        if targets is not None:
            targets = {url: one for url, one in targets.items() if url not in without}
        wanted = "http" if self._config.delta else self._config.kind
        if targets == {} and wanted in TRANSFER_KINDS and self._engine is not None and not without:
            down = self._engine.unreachable()
            if down:
                raise EngineUnavailableError(
                    "no rollout server that needs the weights can be reached",
                    found=f"no answer from {', '.join(down)}",
                    remedy="Restart the servers, and resume the run",
                )
        choice = choose_kind(wanted, self._device.type, set(self._devices), targets)
        if choice.kind == "http" or targets is None:
            return json.dumps(choice._asdict())
        self._targets = targets
        self._hosts = {url: _address_towards(url) for url in targets}
        addresses = set(self._hosts.values())
        self._store = TransferStore.listen(
            next(iter(addresses)) if len(addresses) == 1 else ANY, self._config.timeout_s
        )
        ids = {name for one in targets.values() for name in one.ids}
        workers = sum(len(one.ids) for one in targets.values())
        host = next(iter(addresses)) if len(addresses) == 1 else LOOPBACK
        return json.dumps(
            choice._asdict() | {"host": host, "port": self._store.port, "workers": workers, "ids": sorted(ids)}
        )

    def run(self, source: WeightSource, probe: Probe | None, copies: bool) -> int | None:
        """Return the bytes that were sent to an engine; None if servers have failed and others are left."""
        if self.choice.kind == "http":
            return self._in_requests(source, probe, copies)
        ranks = self._sending_ranks()
        groups = _Counted(source.groups(ranks))
        again = ""
        with raise_on_all_ranks("updating the weights of the engine"):
            try:
                self._transfer(groups, ranks, probe)
            except EngineError as failure:
                if self._engine is not None:
                    again = self._find_next_try()
                if not again and not (self._engine is None and isinstance(failure, TransferError)):
                    raise  # of a transfer that broke off, rank 0 says why
                again = again and f"{again} {one_line(failure)}"
        self.next_try, _, self.cause = all_gather_text(again)[0].partition(" ")
        return None if self.next_try else groups.nbytes

    def _find_next_try(self) -> str:
        """Return what can be tried after a transfer that failed."""
        if self._others_left():
            return "others"
        return "http" if self._config.kind == "auto" else ""

    def _in_requests(self, source: WeightSource, probe: Probe | None, copies: bool) -> int:
        groups = _Counted(source.groups())
        tensors = ((name, one.clone() if copies else one) for group in groups for name, one in group)
        with raise_on_all_ranks("updating the weights of the engine"):
            try:
                if self._engine is not None:
                    self._engine.update_weights(tensors, self._version, probe)
            finally:
                groups.exhaust()
        sent = None if self._engine is None else self._engine.bytes_sent()
        return groups.nbytes if sent is None else sent

    def _sending_ranks(self) -> tuple[int, ...]:
        """Return the ranks that hand weights over: rank 0, and with `ipc` one for each device of a worker."""
        if self.choice.kind == "nccl":
            return (0,)
        needed: list[str] = self._told["ids"]
        return tuple(sorted({0, *(self._devices.index(name) for name in needed)}))

    def _transfer(self, groups: _Counted, ranks: tuple[int, ...], probe: Probe | None) -> None:
        if rank() not in ranks:
            groups.exhaust()
            return
        kind: TransferKind = "ipc" if self.choice.kind == "ipc" else "nccl"
        config, told = self._config, self._told
        rendezvous = Rendezvous(
            kind, told["host"], told["port"], ranks, told["workers"], config.chunk_mib * 2**20, config.timeout_s
        )
        sender = WeightSender(rendezvous, rank(), self._device, groups, self._store)
        with ExitStack() as undo:
            undo.push(partial(self._broke_off, sender, groups))
            if self._engine is None:
                sender.assist()
            else:
                assert self._targets is not None
                transfer = sender.transfer(self._targets, self._hosts)
                self._engine.update_weights(transfer, self._version, probe)
                if transfer.failure is not None:
                    raise transfer.failure
            undo.pop_all()
        sender.close()

    def _broke_off(
        self, sender: WeightSender, groups: _Counted, kind: type | None, error: BaseException | None, traceback: object
    ) -> None:
        self.failed = sender.failed_engines()
        sender.fail("broke off" if error is None else one_line(error))
        if isinstance(error, Exception):  # else this process is ending, and must not wait for the others
            groups.exhaust()

    def _others_left(self) -> bool:
        """Whether another attempt can succeed: there are servers that did not fail, once."""
        if not self._is_first or self._targets is None or "" in self._targets or self._engine is None:
            return False
        alive = self._engine.transfer_targets(self._version) or {}
        self.failed |= {url for url in self._targets if url not in alive}
        return bool(self.failed) and bool(set(self._targets) - self.failed)


class _Counted:
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
        """Read what is left: gathering weights is collective."""
        for _ in self:
            pass


def _address_towards(url: str) -> str:
    """Return the address of this machine that a server sees; the loopback for an engine of this machine."""
    host = urlsplit(url).hostname
    if host is None:
        return LOOPBACK
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only picks the route
        return probe.getsockname()[0]
