"""Time and memory of the parts of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_replay.train.output import clock as clock_module
from moe_replay.train.output.clock import GIB, Clock, Pass, SpeedMeter
from moe_replay.weights.model_sizes import ModelSizes


def test_the_parts_of_a_step_are_timed_and_the_cpu_has_no_device_memory() -> None:
    clock = Clock(torch.device("cpu"))
    with clock("score"):
        pass
    with clock("score"):
        pass
    assert clock.metrics(10).keys() == {"time/score", "time/step", "time/tokens_per_second"}


def test_each_part_has_its_own_peak_and_what_the_whole_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    peak, free = 0, 80 * GIB

    def reset(device: torch.device) -> None:
        nonlocal peak
        peak = 0

    def allocate(gib: int, left: int) -> None:
        nonlocal peak, free
        peak, free = max(peak, gib * GIB), left * GIB

    module = SimpleNamespace(
        reset_peak_memory_stats=reset,
        synchronize=lambda device: None,
        max_memory_allocated=lambda device: peak,
        mem_get_info=lambda device: (free, 80 * GIB),
    )
    monkeypatch.setattr(clock_module, "device_module", lambda device: module)
    clock = Clock(torch.device("cuda", 0))
    with clock("train"):
        allocate(30, left=40)
    with clock("sync"):
        allocate(5, left=70)
    memory = {name: value for name, value in clock.metrics(10).items() if name.startswith("memory/")}
    assert memory == {
        "memory/train_peak_gib": 30,
        "memory/train_device_gib": 40,
        "memory/sync_peak_gib": 5,
        "memory/sync_device_gib": 10,
    }


QWEN3_SLICE = {
    **{"layers": 8, "hidden": 2048, "vocabulary": 151936, "expert_width": 768, "largest": 0, "tied": False},
    **{"top_k": 8, "num_experts": 128, "query_width": 4096, "key_value_width": 512, "attention_width": 4096.0},
    "experts": 8 * 128 * 3 * 2048 * 768,
    "matrices": {},
    "dense": 8 * (2048 * 4096 * 2 + 2 * 2048 * 512 + 2048 * 128),
    "embedding": 151936 * 2048,
    "windows": (None,) * 8,
    "by_layer": (),
}


@pytest.mark.parametrize(("gpus", "copies"), [(1, 1), (8, 8), (8, 2)])
def test_the_speed_of_passes_is_per_gpu(gpus: int, copies: int) -> None:
    """32 sequences of 2048 tokens on rank 0 in 0.967 and 3.942 s: 113 and 83 TFLOP/s, counted by hand for one GPU."""
    meter = SpeedMeter(sizes=ModelSizes(**QWEN3_SLICE), gpus=gpus, copies=copies, peak=990.0, frozen=False)
    passes = [Pass((2048,) * 8, 8 * 2048)] * 4
    timed = {"time/score": 0.967, "time/train": 3.942, "time/tokens_per_second": 800.0}
    found = meter.metrics({"score": passes, "train": passes, "eval": []}, timed)
    shared = copies / gpus  # ranks of one copy share the work
    assert found["time/score_tflops"] == pytest.approx(112.96 * shared, rel=1e-3)
    assert found["time/train_mfu"] == pytest.approx(83.13 * shared / 990, rel=1e-3)
    assert found["time/score_tokens_per_second_per_gpu"] == pytest.approx(65536 / 0.967 * shared)
    assert found["time/tokens_per_second_per_gpu"] == 800 / gpus
    assert not [name for name in found if "eval" in name]


def test_without_sizes_or_peak_only_tokens_are_counted() -> None:
    passes, timed = {"score": [], "train": [Pass((4, 6), 5)]}, {"time/train": 2.0, "time/tokens_per_second": 3.0}
    unknown = SpeedMeter(sizes=None, gpus=1, copies=1, peak=None, frozen=False)
    assert unknown.metrics(passes, timed) == {
        "time/tokens_per_second_per_gpu": 3.0,
        "time/train_tokens_per_second_per_gpu": 5.0,
    }
    no_peak = SpeedMeter(sizes=ModelSizes(**QWEN3_SLICE), gpus=1, copies=1, peak=None, frozen=False)
    assert no_peak.metrics(passes, timed).keys() - unknown.metrics(passes, timed).keys() == {"time/train_tflops"}
