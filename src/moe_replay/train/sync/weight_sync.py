"""Weight sync: the transport of each update of the engine's weights, by the settings, and its cost."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from moe_replay.distributed.ranks import all_gather_json, from_rank_0, raise_on_all_ranks
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.train.config.registries import WEIGHT_TRANSPORTS
from moe_replay.train.config.sections import WeightSyncConfig
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.utils.plugins import resolve, user_code
from moe_replay.weights.identity import Probe
from moe_replay.weights.source import WeightSource, owners_of
from moe_replay.weights.staging import device_id
from moe_replay.weights.transports import (
    TRANSFERS,
    UPDATING,
    Choice,
    HttpTransport,
    Targets,
    TransferFailedError,
    TransferTransport,
    Transport,
    choose_transport,
)

_EXPERTS = {
    "http": "rank 0 gets the experts of one rank after the other, fused ones of a layer whole",
    "transfer": "each rank hands over its own experts",
}
"""Of a policy whose experts are divided among ranks, by transport."""


class SyncReport(NamedTuple):
    """Cost of an update of the engine's weights, the probe included.

    reason   why this transport
    nbytes   that were sent to an engine; of several engines, the most to any
    """

    transport: str
    reason: str
    seconds: float
    nbytes: int

    def metrics(self) -> dict[str, float]:
        gigabytes = self.nbytes / 1e9
        rate = gigabytes / max(self.seconds, 1e-9)
        return {"time/weights": self.seconds, "weights/gb": gigabytes, "time/weights_gb_per_second": rate}


class EngineSync:
    """Updates the engine of a run. Collective: call on every rank; the engine exists on rank 0 only.

    copies   the trainer's memory is freed after the last tensor: an engine that reads tensors gets copies of them
    """

    def __init__(self, config: WeightSyncConfig, device: torch.device, *, copies: bool = False) -> None:
        self._config, self._device = config, device
        self._http = HttpTransport(copies=copies)
        self._devices: list[str] = []  # of all ranks
        self._fallback = ""  # why `auto` sends by http from now on
        self._targets: Targets | None = None  # on rank 0
        self._custom: Transport | None = None  # the user's `module:Class`
        if config.transport not in WEIGHT_TRANSPORTS:
            transport = resolve(
                config.transport, WEIGHT_TRANSPORTS, kind="weight transport", key="weight_sync.transport"
            )
            self._custom = transport(config)

    def send(self, source: WeightSource, engine: SyncedEngine | None, version: int, probe: Probe | None) -> SyncReport:
        """Send all weights. A transfer that `auto` has chosen and that fails is followed by http, for the whole run."""
        began = time.monotonic()
        if self._custom is not None:
            with raise_on_all_ranks(UPDATING), user_code(f"weight transport {self._config.transport!r}", EngineError):
                nbytes = self._custom.send(source, engine, version, probe)
            return SyncReport(self._config.transport, "as configured", time.monotonic() - began, nbytes)
        choice = self._choose(engine, version)
        try:
            nbytes = self._send_by(choice.transport, source, engine, version, probe)
        except TransferFailedError as failure:  # on every rank
            self._fallback = f"{choice.transport} has failed: {failure.problem}"
            choice = Choice("http", self._fallback)
            nbytes = self._http.send(source, engine, version, probe)
        reason = choice.reason
        if owners_of(source):
            reason += f"; {_EXPERTS['http' if choice.transport == 'http' else 'transfer']}"
        return SyncReport(choice.transport, reason, time.monotonic() - began, nbytes)

    def _choose(self, engine: SyncedEngine | None, version: int) -> Choice:
        """Return the transport of an update, on every rank."""
        if self._fallback:
            return Choice("http", self._fallback)
        if not self._devices:
            self._devices = all_gather_json(device_id(self._device))
        return Choice(*from_rank_0(lambda: self._choose_on_rank_0(engine, version), "choosing a weight transport"))

    def _choose_on_rank_0(self, engine: SyncedEngine | None, version: int) -> Choice:
        configured = self._config.transport
        self._targets = None if engine is None or configured == "http" else engine.transfer_targets(version)
        if self._targets == {} and configured in TRANSFERS and engine is not None:
            unreachable = engine.unreachable()
            if unreachable:
                raise EngineUnavailableError(
                    "no rollout server that needs the weights can be reached",
                    found=f"no answer from {', '.join(unreachable)}",
                    remedy="Restart the servers, and resume the run",
                )
        return choose_transport(configured, self._device.type, set(self._devices), self._targets)

    def _send_by(
        self, name: str, source: WeightSource, engine: SyncedEngine | None, version: int, probe: Probe | None
    ) -> int:
        if name == "http":
            return self._http.send(source, engine, version, probe)
        config = self._config
        transport = TransferTransport(
            name,  # type: ignore[arg-type]  the other one is http
            self._device,
            self._devices,
            chunk_bytes=int(config.chunk_mib * 2**20),
            timeout_s=config.timeout_s,
            falls_back=config.transport == "auto",
        )
        return transport.send(source, engine, version, probe, self._targets)
