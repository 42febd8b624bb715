"""Trainer and engine in turns on the same device: who has memory when, and the same run as without turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("safetensors")

from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import Sample, SamplingParams
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.loop import train
from moe_replay.train.setup import launch
from moe_replay.train.sync.shared_devices import SharedDevices
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.weights.identity import Probe
from moe_replay.weights.lora_adapter import Adapter
from moe_replay.weights.source import Weights

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]


class Watching(TransformersEngine):
    """Keeps what it is told in order, with the bytes of the trainer's weights on the device at that moment."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events: list[tuple[str, bool]] = []
        self.backend: Any = None

    def note(self, event: str) -> None:
        shards = [parameter.to_local() for parameter in self.backend._state._trained.values()]
        sizes = {shard.untyped_storage().nbytes() > 0 for shard in shards}
        assert len(sizes) == 1, "all or nothing"
        self.events.append((event, sizes.pop()))

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        self.note("generate")
        return super().generate(prompts, params)

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        self.note("update begins")
        held = list(weights)  # type: ignore[arg-type]
        self.note("update has read all")
        super().update_weights(held, version, probe, weights_id)

    def sleep(self, level: int = 1) -> None:
        self.note(f"sleep {level}")
        super().sleep()

    def wake(self) -> None:
        self.note("wake")
        super().wake()

    def wake_for_update(self) -> None:
        self.note("wake for update")
        super().wake()


SYNC = [("wake for update", True), ("update begins", True), ("update has read all", False)]
STEP = [("generate", False), ("sleep 2", False), *SYNC]
SAVE = [("sleep 1", False), ("wake", False)]


def test_one_of_them_has_memory_at_a_time_and_the_run_is_the_same(
    config: Config, metrics_of: Metrics, monkeypatch: pytest.MonkeyPatch, demo_files: Any
) -> None:
    plain = train(config("plain", steps=2, checkpoint={"every": 0}))
    engine: Any = Watching.from_pretrained(demo_files.model, dtype="float32", device_map="cpu")
    opened = launch.open_backend

    def open_backend(*arguments: Any) -> Any:
        engine.backend = opened(*arguments)
        return engine.backend

    monkeypatch.setattr(launch, "open_backend", open_backend)
    turns = {"backend": {"offload": True}, "rollout": {"sleep": True}, "checkpoint": {"every": 0}}
    moved = train(config("moved", steps=2, **turns), engine)
    assert metrics_of(moved) == metrics_of(plain)
    assert engine.events == [("sleep 2", False), *SYNC, *STEP, *STEP, *SAVE]
    state = [next(folder.glob("checkpoints/*2/**/rank-00000.safetensors")) for folder in (plain, moved)]
    assert state[0].read_bytes() == state[1].read_bytes()


def test_an_engine_may_keep_its_weights_while_it_sleeps(
    config: Config, monkeypatch: pytest.MonkeyPatch, demo_files: Any
) -> None:
    engine: Any = Watching.from_pretrained(demo_files.model, dtype="float32", device_map="cpu")
    monkeypatch.setattr(engine, "note", lambda event: engine.events.append((event, True)))
    train(config("run", steps=1, rollout={"sleep": True, "sleep_level": 1}, checkpoint={"every": 0}), engine)
    assert [event for event, _ in engine.events if "sleep" in event] == ["sleep 1"]


def test_lost_servers_are_waited_for_before_an_adapter_is_sent() -> None:
    told: list[str] = []
    engine: Any = SimpleNamespace(
        wait_for_servers=lambda: told.append("wait"), update_adapter=lambda *_: told.append("update")
    )
    backend: Any = SimpleNamespace(
        adapter=lambda: Adapter([], rank=1, alpha=1.0), device=torch.device("cpu"), shared_base=None
    )
    settings = TrainConfig(
        model={"lora_rank": 1}, rollout={"engine": "rollout_server", "urls": ["http://a"], "lora": True}
    )
    devices = SharedDevices(settings, backend)
    devices.start_with(SyncedEngine(engine))
    assert devices.update_engine(1, None).transport == "adapter"
    assert told == ["wait", "update"]
