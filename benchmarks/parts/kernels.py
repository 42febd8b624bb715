"""Which kernels make one piece of work longer than another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class Profile(NamedTuple):
    """Milliseconds and calls of each kernel, on a CPU of each operator; milliseconds in which none ran."""

    kernels: dict[str, tuple[float, int]]
    idle: float


def profile_of(work: Callable[[], Any], device: torch.device) -> Profile:
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU

    def counts(event: Any) -> bool:  # names of sections span their kernels
        return event.device_type == kind and not (on_gpu and event.is_user_annotation)

    kernels = {}
    for event in filter(counts, profiled.key_averages()):
        if taken := event.self_device_time_total if on_gpu else event.self_cpu_time_total:
            kernels[event.key] = (taken / 1e3, event.count)
    ranges = sorted((event.time_range.start, event.time_range.end) for event in filter(counts, profiled.events()))
    idle, until = 0.0, ranges[0][0]
    for start, end in ranges:
        idle, until = idle + max(0.0, start - until), max(until, end)
    return Profile(kernels, idle / 1e3)


def difference(name: str, one: Profile, other_name: str, other: Profile, rows: int) -> str:
    """Return a table of the kernels whose times differ most, of so many."""
    none = (0.0, 0)
    keys = sorted(
        one.kernels.keys() | other.kernels.keys(),
        key=lambda key: -abs(one.kernels.get(key, none)[0] - other.kernels.get(key, none)[0]),
    )
    lines = [f"| ms (calls) | {name} | {other_name} | difference |", "|---|---|---|---|"]
    totals = [(sum(taken for taken, _ in each.kernels.values()), each.idle) for each in (one, other)]
    for title, index in (("all", 0), ("waiting", 1)):
        a, b = (total[index] for total in totals)
        lines.append(f"| {title} | {a:.2f} | {b:.2f} | {a - b:+.2f} |")
    for key in keys[:rows]:
        (a, calls), (b, other_calls) = one.kernels.get(key, none), other.kernels.get(key, none)
        lines.append(f"| {key[:80].replace('|', '/')} | {a:.2f} ({calls}) | {b:.2f} ({other_calls}) | {a - b:+.2f} |")
    return "\n".join(lines)
