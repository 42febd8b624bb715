"""Wall-clock time and device memory of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_replay.utils.device import device_module
from moe_replay.utils.units import GIB


class Clock:
    """Times the parts of a step and measures their memory; the step starts when the clock is created.

    clock = Clock(device)
    with clock("rollout"):
        ...
    """

    def __init__(self, device: torch.device) -> None:
        self._started_at = time.monotonic()
        self._parts: dict[str, float] = {}
        self._memory: dict[str, float] = {}
        self._device = None if device.type == "cpu" else device

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if self._device is not None:
            device_module(self._device).reset_peak_memory_stats(self._device)
        started_at = time.monotonic()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - started_at
        if self._device is not None:
            self._measure_memory(part, self._device)

    def _measure_memory(self, part: str, device: torch.device) -> None:
        module = device_module(device)
        free, total = module.mem_get_info(device)
        self._memory[f"memory/{part}_peak_gib"] = module.max_memory_allocated(device) / GIB
        self._memory[f"memory/{part}_device_gib"] = (total - free) / GIB

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return seconds of each part and of the whole step so far, tokens per second of the step, and GPU memory."""
        step = time.monotonic() - self._started_at
        parts = {f"time/{part}": seconds for part, seconds in self._parts.items()}
        speed = {"time/step": step, "time/tokens_per_second": tokens / max(step, 1e-9)}
        return {**parts, **speed, **self._memory}
