"""Traces that ranks hold in parts, put together: as bytes over a process group, never as pickled objects.

A recording is replayed where it was made without moving at all. Only what leaves the trainer (a store, a report,
another parallel layout) needs whole traces:

    for group in (tensor_and_context_parallel, pipeline_parallel):      # ranks that share the micro-batch
        traces = merge_traces(traces, group)
    traces = collect_traces(traces, data_parallel)                      # ranks that have micro-batches of their own
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from moe_replay.errors import AlignmentError
from moe_replay.routes.trace import RouteTrace


def merge_traces(traces: Sequence[RouteTrace], group: dist.ProcessGroup | None = None) -> list[RouteTrace]:
    """Whole traces, on every rank of a group whose ranks hold parts of the same sequences, in the same order."""
    parts = _of_all_ranks(traces, group)
    counts = [len(part) for part in parts]
    if len(set(counts)) > 1:
        raise AlignmentError(
            "ranks hold different numbers of sequences, so they cannot hold parts of the same ones",
            expected="as many on each rank",
            found=counts,
            remedy="merge_traces is for ranks that share a micro-batch; for data-parallel ranks use collect_traces",
        )
    return [RouteTrace.merge(shards) for shards in zip(*parts, strict=True)]


def collect_traces(traces: Sequence[RouteTrace], group: dist.ProcessGroup | None = None) -> list[RouteTrace]:
    """The traces of all ranks of a group, one after the other, on every rank."""
    return [trace for part in _of_all_ranks(traces, group) for trace in part]


def _of_all_ranks(traces: Sequence[RouteTrace], group: dist.ProcessGroup | None) -> list[list[RouteTrace]]:
    encoded = [trace.to_bytes() for trace in traces]
    sizes = all_gather(np.array([len(data) for data in encoded], np.int64).view(np.uint8), group)
    contents = all_gather(np.frombuffer(b"".join(encoded), np.uint8), group)
    return [_decoded(content, size.view(np.int64)) for content, size in zip(contents, sizes, strict=True)]


def _decoded(content: np.ndarray, sizes: np.ndarray) -> list[RouteTrace]:
    ends = np.cumsum(sizes)
    bounds = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    return [RouteTrace.from_bytes(content[start:end].tobytes()) for start, end in bounds]


def all_gather(content: np.ndarray, group: dist.ProcessGroup | None = None) -> list[np.ndarray]:
    """Bytes of any number from each rank, in the order of ranks."""
    device = _device(group)
    length = torch.tensor([content.size], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = torch.cat(lengths).tolist()
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=device)
    padded[: content.size] = torch.from_numpy(content.copy())
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [one[:size].cpu().numpy() for one, size in zip(received, sizes, strict=True)]


def from_first_rank(content: bytes | None) -> bytes:
    """The bytes that the first of all ranks has, on every rank; the others give None."""
    device = _device(None)
    size = torch.tensor([len(content or b"")], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    sent = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if content:
        sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(sent, 0)
    return sent.cpu().numpy().tobytes()


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where a group's messages must lie."""
    if dist.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
