"""Trajectories as bytes: sections of records, any of which is read without the others and without copying its routes.

section: u64 number of records N | (N + 1) u64 offsets of the records and of their end | records
record:  header | trace (docs/trace-format.md) | log-probs, float32 | versions, (start, version) int64 | sampling mask

Every part begins at a multiple of 64 bytes. Token ids are those of the trace.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Self

import numpy as np

from moe_replay.rollout.sampling_mask import SamplingMask
from moe_replay.rollout.sampling_mask_wire import mask_from_bytes, mask_to_bytes
from moe_replay.rollout.types import FinishReason, is_unrouted
from moe_replay.routes.trace_parts import spans_of
from moe_replay.routes.wire import decode_trace, encode_parts
from moe_replay.train.types import Trajectory

ALIGNMENT = 64
_HEADER = struct.Struct("<qqddQQQIB3x")
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
    reason = _REASONS.index(trajectory.finish_reason)
    sizes = (sum(map(len, routes)), len(spans), len(mask))
    head = _HEADER.pack(
        trajectory.row, trajectory.group, trajectory.reward, trajectory.advantage, *sizes, length, reason
    )
    logprobs = np.ascontiguousarray(trajectory.logprobs, "<f4").tobytes()
    groups: list[Buffers] = [[memoryview(head)], routes, *([memoryview(part)] for part in (logprobs, spans, mask))]
    return list(chain.from_iterable([*group, *_padding(sum(map(len, group)))] for group in groups))


def record_bytes(trace_bytes: int, tokens: int, version_spans: int = 2) -> int:
    """Return the size of the record of a trajectory without a sampling mask.

    version_spans   runs of tokens of one version; 2: a prompt and what one version sampled
    """
    return sum(map(_aligned, (_HEADER.size, trace_bytes, 4 * tokens, 16 * version_spans)))


class Record(NamedTuple):
    """The parts of a record of `length` tokens, in a buffer; routes are not decoded."""

    row: int
    group: int
    reward: float
    advantage: float
    length: int
    finish_reason: FinishReason
    routes: memoryview
    logprobs: memoryview
    spans: memoryview
    mask: memoryview

    @classmethod
    def of(cls, record: memoryview) -> Self:
        """Return the parts of a record."""
        row, group, reward, advantage, *sizes, length, reason = _HEADER.unpack_from(record)
        starts = np.cumsum([_aligned(_HEADER.size), *map(_aligned, (sizes[0], 4 * length, sizes[1]))]).tolist()
        parts = (
            record[start : start + size]
            for start, size in zip(starts, (sizes[0], 4 * length, sizes[1], sizes[2]), strict=True)
        )
        return cls(row, group, reward, advantage, length, _REASONS[reason], *parts)

    @property
    def versions(self) -> np.ndarray:
        """(T,) int64: weight version that sampled each token."""
        begins, versions = np.frombuffer(self.spans, "<i8").reshape(-1, 2).T
        return np.repeat(versions, np.diff(np.append(begins, self.length))).astype(np.int64)

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The support of each token, where there is one."""
        return mask_from_bytes(bytes(self.mask)) if len(self.mask) else None


def read_record(record: memoryview) -> Trajectory:
    """Return the trajectory of a record in a read-only buffer, which its arrays view."""
    parts = Record.of(record)
    trace = decode_trace(parts.routes)
    return Trajectory(
        row=parts.row,
        group=parts.group,
        token_ids=trace.token_ids,
        logprobs=np.frombuffer(parts.logprobs, "<f4"),
        versions=parts.versions,
        trace=trace,
        finish_reason=parts.finish_reason,
        reward=parts.reward,
        advantage=parts.advantage,
        sampling_mask=parts.sampling_mask,
    )


def with_advantage(record: memoryview, advantage: float) -> Buffers:
    """Return a record with another advantage, as buffers; nothing but its header is copied."""
    head = bytearray(record[: _HEADER.size])
    _ADVANTAGE.pack_into(head, _ADVANTAGE_AT, advantage)
    return [memoryview(head), record[_HEADER.size :]]


def trajectories_to_bytes(trajectories: Sequence[Trajectory], layers: Sequence[int] | None = None) -> bytes:
    """Return a section of trajectories, with the routes of some layers."""
    return section_of([record_parts(one, layers) for one in trajectories])


def section_of(records: Sequence[Buffers]) -> bytes:
    """Return a section of records, each of them as buffers."""
    sizes = [table_bytes(len(records)), *(sum(map(len, one)) for one in records)]
    return b"".join([table(list(accumulate(sizes))), *chain.from_iterable(records)])


def trajectories_from_bytes(data: bytes) -> list[Trajectory]:
    """Return the trajectories of a section."""
    return list(read_section(memoryview(data)))


def read_section(section: memoryview, numbers: Iterable[int] | None = None) -> Iterator[Trajectory]:
    """Yield the trajectories of a section in a read-only buffer, or those with these numbers."""
    offsets = read_table(section).tolist()
    for number in range(len(offsets) - 1) if numbers is None else numbers:
        yield read_record(section[offsets[number] : offsets[number + 1]])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padding(size: int) -> Buffers:
    return [memoryview(bytes(_aligned(size) - size))] if size % ALIGNMENT else []
