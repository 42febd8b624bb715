"""Time and memory of the parts of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_replay.train import clock as clock_module
from moe_replay.train.clock import GIB, Clock


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
