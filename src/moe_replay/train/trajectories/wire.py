"""Trajectories as bytes: sections of records, any of which is read without the others and without copying its routes.

section: u64 number of records N | (N + 1) u64 offsets of the records and of their end | records
record:  header | trace (docs/trace-format.md) | log-probs, float32 | versions, (start, version) int64 | sampling mask |
         servers, [start, URL] as JSON

Every part begins at a multiple of 64 bytes. Token ids are those of the trace.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from moe_replay.interop.capture import is_unrouted
from moe_replay.records import FinishReason, Layers, RolloutBatch, Trajectory, TrajectoryHeader
from moe_replay.routes.codec import decode_token_ids
from moe_replay.routes.trace import RouteTrace, decode_trace, encode_parts
from moe_replay.routes.trace_parts import spans_of
from moe_replay.sampling_mask import mask_from_bytes, mask_to_bytes

ALIGNMENT = 64
_HEADER = struct.Struct("<qqddQQQQIiB3x")
_ADVANTAGE, _ADVANTAGE_AT = struct.Struct("<d"), struct.calcsize("<qqd")
_REASONS = tuple(FinishReason)

Buffers = list[memoryview]


def table_bytes(count: int) -> int:
    """Return the size of the table of a section of `count` records."""
    return _aligned(8 * (count + 2))


def table(offsets: Sequence[int]) -> bytes:
    """Return the table of a section, from the offsets of its records and of their end."""
    count = len(offsets) - 1
    return np.array([count, *offsets], "<u8").tobytes().ljust(table_bytes(count), b"\0")


def read_table(section: memoryview) -> np.ndarray:
    """(N + 1,) uint64: offsets of the records of a section, and of their end."""
    count = int.from_bytes(section[:8], "little")
    return np.frombuffer(section[8 : 8 * (count + 2)], "<u8")


def record_parts(trajectory: Trajectory, layers: Sequence[int] | None) -> Buffers:
    """Return the record of one trajectory as buffers; where all layers are kept, routes are views and not copied."""
    trace = trajectory.trace
    if layers is not None and tuple(layers) != trace.layers and not is_unrouted(trace):
        trace = trace.select_layers(layers or trace.layers[:1])  # a stage without routers still needs the tokens
    routes = encode_parts(trace)
    length = len(trajectory)
    spans = np.array(spans_of(trajectory.versions) if length else [], "<i8").tobytes()
    mask = b"" if trajectory.sampling_mask is None else mask_to_bytes(trajectory.sampling_mask)
    servers = json.dumps(trajectory.servers).encode() if trajectory.servers else b""
    reason = _REASONS.index(trajectory.finish_reason)
    sizes = (sum(map(len, routes)), len(spans), len(mask), len(servers))
    scalars = (trajectory.row, trajectory.group, trajectory.reward, trajectory.advantage)
    head = _HEADER.pack(*scalars, *sizes, length, trajectory.episode, reason)
    logprobs = np.ascontiguousarray(trajectory.logprobs, "<f4").tobytes()
    groups: list[Buffers] = [
        [memoryview(head)],
        routes,
        *([memoryview(part)] for part in (logprobs, spans, mask, servers)),
    ]
    return list(chain.from_iterable([*group, *_padding(sum(map(len, group)))] for group in groups))


def record_bytes(trace_bytes: int, tokens: int) -> int:
    """Return the size of the record of a trajectory without a sampling mask, of an engine in this process."""
    version_spans = 2  # runs of tokens of one version: a prompt, and what one version sampled
    return sum(map(_aligned, (_HEADER.size, trace_bytes, 4 * tokens, 16 * version_spans)))


def read_record(record: memoryview, *, routes: bool = True) -> Trajectory:
    """Return the trajectory of a record in a read-only buffer, which its arrays view; without routes, none is read."""
    row, group, reward, advantage, *sizes, length, episode, reason = _HEADER.unpack_from(record)
    sizes.insert(1, 4 * length)  # of the log-probs
    starts = np.cumsum([_aligned(_HEADER.size), *map(_aligned, sizes[:-1])]).tolist()
    parts = (record[start : start + size] for start, size in zip(starts, sizes, strict=True))
    encoded, logprobs, spans, mask, servers = parts
    trace = decode_trace(encoded) if routes else RouteTrace.uncovered(decode_token_ids(encoded), (0,), 1)
    begins, versions = np.frombuffer(spans, "<i8").reshape(-1, 2).T
    return Trajectory(
        row=row,
        group=group,
        token_ids=trace.token_ids,
        logprobs=np.frombuffer(logprobs, "<f4"),
        versions=np.repeat(versions, np.diff(np.append(begins, length))).astype(np.int64),
        trace=trace,
        finish_reason=_REASONS[reason],
        reward=reward,
        advantage=advantage,
        episode=episode,
        sampling_mask=mask_from_bytes(bytes(mask)) if len(mask) else None,
        servers=tuple((start, url) for start, url in json.loads(bytes(servers))) if len(servers) else (),
    )


def stored_parts(trajectory: Trajectory, layers: Layers) -> Buffers:
    """Return the record of a trajectory with the routes of some layers; one that a worker has encoded is not copied."""
    if trajectory.encoded is None:
        return record_parts(trajectory, layers)
    record = trajectory.encoded.records[layers]
    head = bytearray(record[: _HEADER.size])
    _ADVANTAGE.pack_into(head, _ADVANTAGE_AT, trajectory.advantage)  # known only once the whole group is scored
    return [memoryview(head), record[_HEADER.size :]]


def read_section(section: memoryview, indices: Iterable[int] | None = None) -> Iterator[Trajectory]:
    offsets = read_table(section).tolist()
    for index in range(len(offsets) - 1) if indices is None else indices:
        yield read_record(section[offsets[index] : offsets[index + 1]])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padding(size: int) -> Buffers:
    return [memoryview(bytes(_aligned(size) - size))] if size % ALIGNMENT else []


# ---- batches: what all ranks get ------------------------------------------------------------------------------------

_HEADER_DTYPE = np.dtype(
    [
        *(("row", "<i8"), ("group", "<i8"), ("length", "<i4"), ("num_scored", "<i4")),
        *(("reward", "<f8"), ("advantage", "<f8"), ("oldest", "<i8"), ("newest", "<i8"), ("truncated", "?")),
        ("episode", "<i4"),
    ]
)
HEADER_BYTES = _HEADER_DTYPE.itemsize


def header_of(trajectory: Trajectory) -> TrajectoryHeader:
    versions = trajectory.versions[trajectory.sampled]
    oldest, newest = (int(versions.min()), int(versions.max())) if versions.size else (-1, -1)
    return TrajectoryHeader(
        row=trajectory.row,
        group=trajectory.group,
        length=len(trajectory),
        num_scored=int(trajectory.sampled[1:].sum()),
        reward=trajectory.reward,
        advantage=trajectory.advantage,
        oldest=oldest,
        newest=newest,
        truncated=trajectory.truncated,
        episode=trajectory.episode,
    )


def batch_to_bytes(batch: RolloutBatch) -> bytes:
    """Return a batch for the ranks that did not sample it: without metrics and completions."""
    location = json.dumps([batch.layers, batch.number, batch.file, batch.sections, batch.servers])
    headers = np.array([tuple(header) for header in batch.headers], _HEADER_DTYPE)
    return location.encode() + b"\n" + headers.tobytes()


def batch_from_bytes(data: bytes) -> RolloutBatch:
    location, _, headers = data.partition(b"\n")
    layers, number, file, sections, servers = json.loads(location)
    return RolloutBatch(
        headers=[TrajectoryHeader(*values) for values in np.frombuffer(headers, _HEADER_DTYPE).tolist()],
        layers=tuple(layers),
        number=number,
        file=file,
        sections=tuple((start, size) for start, size in sections),
        servers=tuple(servers),
    )
