"""Whole traces from the parts that ranks hold, exchanged as bytes over a process group, never as pickled objects.

A recording is replayed on the rank that made it and never moves. Only what leaves the trainer (a store, a report,
another parallel layout) needs whole traces:

    for group in (tensor_and_context_parallel, pipeline_parallel):      # ranks that share the micro-batch
        traces = merge_traces(traces, group)
    traces = collect_traces(traces, data_parallel)                      # ranks that have different micro-batches
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from moe_replay.distributed.collectives import all_gather
from moe_replay.errors import AlignmentError
from moe_replay.routes.trace import RouteTrace


def merge_traces(traces: Sequence[RouteTrace], group: dist.ProcessGroup | None = None) -> list[RouteTrace]:
    """Return whole traces on every rank of a group whose ranks hold parts of the same sequences, in the same order."""
    parts = _all_gather_traces(traces, group)
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
    """Return the traces of all ranks of a group, concatenated in rank order, on every rank."""
    return [trace for part in _all_gather_traces(traces, group) for trace in part]


def _all_gather_traces(traces: Sequence[RouteTrace], group: dist.ProcessGroup | None) -> list[list[RouteTrace]]:
    encoded = [trace.to_bytes() for trace in traces]
    sizes = all_gather(np.array([len(data) for data in encoded], np.int64).view(np.uint8), group)
    contents = all_gather(np.frombuffer(b"".join(encoded), np.uint8), group)
    return [_decode(content, size.view(np.int64)) for content, size in zip(contents, sizes, strict=True)]


def _decode(content: np.ndarray, sizes: np.ndarray) -> list[RouteTrace]:
    ends = np.cumsum(sizes)
    bounds = zip((ends - sizes).tolist(), ends.tolist(), strict=True)
    return [RouteTrace.from_bytes(content[start:end].tobytes()) for start, end in bounds]
