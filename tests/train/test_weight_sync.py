"""Which kind of weight sync is chosen, and what follows one that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_replay.engines.base import Engine
from moe_replay.errors import EngineError, EngineName, EngineUnavailableError
from moe_replay.train.config.sections import WeightSyncConfig
from moe_replay.train.sync import weight_sync
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.sync.weight_sync import EngineSync
from moe_replay.weights.transfer import Receivers, Transfer
from moe_replay.weights.transports import Choice, choose_transport
from tests.support.weight_sources import IteratorSource

TRAINER = {"gpu 0", "gpu 1"}
SHARED = {"": Receivers("cuda", ("gpu 0", "gpu 1"))}
APART = {"http://a": Receivers("cuda", ("gpu 2",)), "http://b": Receivers("cuda", ("gpu 3",))}
MIXED = {"http://a": Receivers("cuda", ("gpu 1",)), "http://b": Receivers("cuda", ("gpu 3",))}
ON_CPU = {"": Receivers("cpu", ("machine",))}


@pytest.mark.parametrize(
    ("targets", "kind"), [(SHARED, "ipc"), (APART, "nccl"), (MIXED, "http"), (ON_CPU, "http"), (None, "http")]
)
def test_auto_goes_by_where_the_workers_are(targets: dict[str, Receivers] | None, kind: str) -> None:
    choice = choose_transport("auto", "cuda", TRAINER, targets)
    assert choice.transport == kind
    assert choice.reason


def test_a_trainer_on_a_cpu_sends_in_requests() -> None:
    assert choose_transport("auto", "cpu", {"machine"}, ON_CPU).transport == "http"


@pytest.mark.parametrize("wanted", ["http", "ipc", "nccl"])
def test_what_is_configured_is_used_on_cpus(wanted: str) -> None:
    assert choose_transport(wanted, "cpu", {"machine"}, ON_CPU) == (wanted, "as configured")


@pytest.mark.parametrize(
    ("wanted", "targets", "text"),
    [
        ("ipc", APART, "no rank of the trainer uses"),
        ("ipc", MIXED, "no rank of the trainer uses"),
        ("nccl", SHARED, "NCCL does not allow"),
        ("nccl", MIXED, "NCCL does not allow"),
        ("nccl", ON_CPU, "one type of device"),
        ("ipc", None, "in requests only"),
    ],
)
def test_what_cannot_be_is_refused(wanted: str, targets: dict[str, Receivers] | None, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        choose_transport(wanted, "cuda", TRAINER, targets)


def test_other_accelerators_get_weights_in_requests() -> None:
    targets = {"": Receivers("npu", ("npu 0",))}
    assert choose_transport("auto", "npu", {"npu 0"}, targets).transport == "http"
    with pytest.raises(EngineError, match="'ipc' needs CUDA GPUs, or CPUs: found npu"):
        choose_transport("ipc", "npu", {"npu 0"}, targets)


class Unsampled(Engine):
    """An engine that only takes weights."""

    name, weight_version, weights_id = EngineName("an engine", "1"), 0, ""

    def generate(self, prompts: Any, params: Any) -> Any:
        raise NotImplementedError

    def prompt_logprobs(self, token_ids: Any) -> Any:
        raise NotImplementedError


class Down(Unsampled):
    """Servers of which none answers, or none lacks the weights."""

    def __init__(self, down: list[str]) -> None:
        self.down, self.sent = down, 0

    def receivers_by_url(self, weights_id: str = "") -> dict[str, Receivers | None]:
        return {}

    def unreachable(self) -> list[str]:
        return self.down

    def update_weights(self, weights: Any, version: int, probe: Any = None, weights_id: str = "") -> None:
        self.sent += 1


@pytest.mark.parametrize("wanted", ["ipc", "nccl"])
def test_servers_that_are_down_are_named(wanted: str) -> None:
    sync = EngineSync(WeightSyncConfig(transport=wanted, timeout_s=60), torch.device("cpu"))  # type: ignore[arg-type]
    source = IteratorSource({"a": torch.ones(1)}.items)
    engine = Down(["http://a", "http://b"])
    with pytest.raises(EngineUnavailableError, match=r"can be reached.*http://a, http://b.*Restart"):
        sync.send(source, SyncedEngine(engine), 1, None)  # type: ignore[arg-type]
    nothing_to_do = Down([])
    assert sync.send(source, SyncedEngine(nothing_to_do), 1, None).reason.startswith("there is no server")  # type: ignore[arg-type]
    assert (engine.sent, nothing_to_do.sent) == (0, 1)


class NoTransfers(Unsampled):
    """An engine whose workers cannot open the trainer's memory."""

    receivers = Receivers("cpu", ("machine",))

    def __init__(self) -> None:
        self.loaded: dict[str, torch.Tensor] = {}
        self.transfers = 0

    def update_weights(self, weights: Any, version: int, probe: Any = None, weights_id: str = "") -> None:
        self.loaded = dict(weights)

    def receive_weights(self, transfer: Transfer, version: int, probe: Any = None, weights_id: str = "") -> None:
        self.transfers += 1
        raise EngineError("the memory cannot be opened")


def test_a_transfer_that_auto_chose_and_that_fails_is_followed_by_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        weight_sync,
        "choose_transport",
        lambda wanted, *_: Choice("ipc" if wanted in ("auto", "ipc") else "http", "chosen"),
    )
    monkeypatch.setattr(weight_sync, "device_id", lambda _: "machine")
    tensors = {f"model.layers.{number}.weight": torch.full((3,), number) for number in range(3)}
    engine = NoTransfers()
    sync = EngineSync(WeightSyncConfig(timeout_s=60), torch.device("cpu"))
    for version in (1, 2):
        report = sync.send(IteratorSource(tensors.items), SyncedEngine(engine), version, None)  # type: ignore[arg-type]
        assert report.transport == "http"
        assert "the memory cannot be opened" in report.reason
        assert engine.loaded.keys() == tensors.keys()
    assert engine.transfers == 1
    configured = EngineSync(WeightSyncConfig(transport="ipc", timeout_s=60), torch.device("cpu"))
    with pytest.raises(EngineError, match="cannot be opened"):
        configured.send(IteratorSource(tensors.items), SyncedEngine(engine), 3, None)  # type: ignore[arg-type]
