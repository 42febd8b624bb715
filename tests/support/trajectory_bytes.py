"""Sections of trajectories as bytes, written and read in one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

from moe_replay.records import Trajectory
from moe_replay.train.trajectories.wire import read_section, record_parts, table, table_bytes


def trajectories_to_bytes(trajectories: Sequence[Trajectory], layers: Sequence[int] | None = None) -> bytes:
    """Return a section of trajectories, with the routes of some layers."""
    records = [record_parts(trajectory, layers) for trajectory in trajectories]
    sizes = [table_bytes(len(records)), *(sum(map(len, record)) for record in records)]
    return b"".join([table(list(accumulate(sizes))), *chain.from_iterable(records)])


def trajectories_from_bytes(data: bytes) -> list[Trajectory]:
    return list(read_section(memoryview(data)))
