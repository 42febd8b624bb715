"""Wall-clock time and device memory of the parts of a step, and the speed of its passes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moe_replay.utils.device import device_module
from moe_replay.utils.misc import GIB
from moe_replay.weights.model_sizes import ModelSizes


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
        if self._device is not None:
            device_module(self._device).synchronize(self._device)
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


class Pass(NamedTuple):
    """Sequences that went through the model together: their lengths, and how many of their tokens were scored.

    shared   lengths of prefixes that were not computed, because they are those of other sequences
    """

    lengths: tuple[int, ...]
    scored: int
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SpeedMeter:
    """Tokens and floating point operations per second and GPU, from the passes of rank 0.

    sizes   of the model; None where they are not known: tokens are counted alone
    gpus    trainer GPUs
    copies  of the policy: data-parallel ranks, which have about equal shares of the tokens
    peak    TFLOP/s of a GPU; None where it is not known
    frozen  whether parameters have no gradients (LoRA)
    """

    sizes: ModelSizes | None
    gpus: int
    copies: int
    peak: float | None
    frozen: bool

    def metrics(self, passes: Mapping[str, Sequence[Pass]], timed: Mapping[str, float]) -> dict[str, float]:
        """Return the speed of each phase that has passes; `timed` has time/<phase>."""
        metrics = {"time/tokens_per_second_per_gpu": timed["time/tokens_per_second"] / self.gpus}
        for phase, passes_of_phase in passes.items():
            seconds = timed.get(f"time/{phase}", 0.0) * self.gpus / self.copies
            if not passes_of_phase or not seconds:
                continue
            tokens = sum(length for pass_ in passes_of_phase for length in pass_.lengths)
            metrics[f"time/{phase}_tokens_per_second_per_gpu"] = tokens / seconds
            if self.sizes is not None:
                tflops = sum(self._flops(phase, pass_) for pass_ in passes_of_phase) / seconds / 1e12
                metrics[f"time/{phase}_tflops"] = tflops
                if self.peak is not None:
                    metrics[f"time/{phase}_mfu"] = tflops / self.peak
        return metrics

    def _flops(self, phase: str, pass_: Pass) -> float:
        assert self.sizes is not None
        flops, saved = self.sizes.forward_flops(pass_.lengths, pass_.scored), self.sizes.forward_flops(pass_.shared, 0)
        if phase == "train":
            return flops.update(frozen=self.frozen) - saved.update(frozen=self.frozen)
        return flops.forward - saved.forward
