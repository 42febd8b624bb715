"""Timers in vLLM's worker that say where the time of its steps goes: a few timestamps a step, only when asked for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from moe_replay.utils.device import device_module


class StepTimers:
    """Time of the parts of steps, on the host and on the device.

    device   whose work is timed by events; a CPU has none
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host_s: defaultdict[str, float] = defaultdict(float)
        self._events: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._began = time.perf_counter()
        self.counts: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part of a step."""
        events = None
        if self._device.type != "cpu":
            module = device_module(self._device)
            events = module.Event(enable_timing=True), module.Event(enable_timing=True)
            events[0].record()
        began = time.perf_counter()
        yield
        self._host_s[name] += time.perf_counter() - began
        if events is not None:
            events[1].record()
            self._events[name].append(events)

    def report(self) -> dict[str, float]:
        """Return counts, and milliseconds a step of each part; waits for the device."""
        if self._device.type != "cpu":
            device_module(self._device).synchronize(self._device)
        steps = max(1, self.counts["steps"])
        whole = time.perf_counter() - self._began
        found: dict[str, float] = {**self.counts, "whole_host_ms": 1e3 * whole / steps}
        for name, seconds in self._host_s.items():
            found[f"{name}_host_ms"] = 1e3 * seconds / steps
        for name, events in self._events.items():
            found[f"{name}_device_ms"] = sum(first.elapsed_time(last) for first, last in events) / steps
        return found


class TimedSteps:
    """Times the steps of a worker of vLLM while `replay_profile` has switched it on. Mixed into a worker."""

    model_runner: Any  # vLLM's
    replay_timers: StepTimers | None = None

    def replay_profile(self, on: bool) -> dict[str, float]:
        """Start to time steps, or stop; return what was measured since it was started."""
        before, self.replay_timers = self.replay_timers, StepTimers(self.model_runner.device) if on else None
        return {} if before is None else before.report()

    def replay_timed(self, part: str) -> AbstractContextManager[None]:
        """Return a context that times a part of a step, if steps are timed."""
        return nullcontext() if self.replay_timers is None else self.replay_timers.part(part)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step of vLLM itself."""
        if self.replay_timers is not None:
            counts = self.replay_timers.counts
            counts["steps"] += 1
            counts["tokens"] += scheduler_output.total_num_scheduled_tokens
            counts["drafts"] += sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
            counts["preempted"] += len(scheduler_output.preempted_req_ids or ())
        with self.replay_timed("forward"):
            return super().execute_model(scheduler_output)  # type: ignore[misc]
