"""vLLM's workers with timers that show where the time of a step goes; a few timestamps a step, only while switched on.

Named to vLLM as `worker_cls`: `GpuWorker` and `CpuWorker` capture routes as those of moe_replay do, `GpuTimedWorker`
and `CpuTimedWorker` capture none.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from moe_replay.engines.vllm import arguments
from moe_replay.engines.vllm.capture_worker import MIXINS, RouteCapture, worker_class
from moe_replay.utils.device import device_module


class StepTimers:
    """Time of each part of a step, on the host and on the device (by events; a CPU has none)."""

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
        """Return counts, and milliseconds per step of each part; waits for the device."""
        if self._device.type != "cpu":
            device_module(self._device).synchronize(self._device)
        steps = max(1, self.counts["steps"])
        whole = time.perf_counter() - self._began
        report: dict[str, float] = {**self.counts, "whole_host_ms": 1e3 * whole / steps}
        for name, seconds in self._host_s.items():
            report[f"{name}_host_ms"] = 1e3 * seconds / steps
        for name, events in self._events.items():
            report[f"{name}_device_ms"] = sum(first.elapsed_time(last) for first, last in events) / steps
        return report


class TimedSteps:
    """Times a worker's steps while `replay_profile` has switched it on. Mixed into a worker of vLLM."""

    model_runner: Any  # vLLM's
    replay_timers: StepTimers | None = None

    def replay_profile(self, on: bool) -> dict[str, float]:
        """Start or stop timing; return the report of the time since the last start."""
        timers, self.replay_timers = self.replay_timers, StepTimers(self.model_runner.device) if on else None
        return {} if timers is None else timers.report()

    def replay_timed(self, part: str) -> AbstractContextManager[None]:
        """Time a part of a step, if timing is on."""
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


class TimedCapture(RouteCapture):
    """Route capture that is timed as well; the worker also has `TimedSteps`, below this class."""

    replay_timed: Callable[[str], AbstractContextManager[None]]

    def replay_read(self, *arguments: Any) -> None:
        with self.replay_timed("read"):
            super().replay_read(*arguments)

    def replay_store(self, *arguments: Any) -> None:
        with self.replay_timed("store"):
            super().replay_store(*arguments)


_MIXINS: dict[str, tuple[type, ...]] = {
    "GpuWorker": (TimedCapture, *MIXINS["GpuWorker"][1:], TimedSteps),
    "CpuWorker": (TimedCapture, *MIXINS["CpuWorker"][1:], TimedSteps),
    "GpuWorkerWithoutCapture": (*MIXINS["GpuWorkerWithoutCapture"], TimedSteps),
    "GpuTimedWorker": (TimedSteps,),
    "CpuTimedWorker": (TimedSteps,),
}


def __getattr__(name: str) -> type:
    if name not in _MIXINS:
        raise AttributeError(name)
    return worker_class(name, _MIXINS[name], __name__)


def use_timed_workers() -> None:
    """Have engines that this process starts from now on use the workers of this module."""
    arguments.WORKER_MODULE = __name__
