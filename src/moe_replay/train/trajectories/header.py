"""`TrajectoryHeader`: what every rank must know of every trajectory of a step, to divide them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from moe_replay.train.types import AnyTrajectory

_RECORD = np.dtype(
    [
        *(("row", "<i8"), ("group", "<i8"), ("length", "<i4"), ("num_scored", "<i4")),
        *(("reward", "<f8"), ("advantage", "<f8"), ("oldest", "<i8"), ("newest", "<i8"), ("truncated", "?")),
    ]
)
HEADER_BYTES = _RECORD.itemsize


class TrajectoryHeader(NamedTuple):
    """The fixed-size record of a trajectory of `length` tokens that goes to all ranks.

    num_scored       sampled tokens that are trained on: all but one that begins the sequence
    oldest, newest   weight versions that sampled its tokens; -1 if none is sampled
    """

    row: int
    group: int
    length: int
    num_scored: int
    reward: float
    advantage: float
    oldest: int
    newest: int
    truncated: bool

    @classmethod
    def of(cls, trajectory: AnyTrajectory) -> Self:
        """Return the header of a trajectory."""
        versions = trajectory.versions[trajectory.sampled]
        oldest, newest = (int(versions.min()), int(versions.max())) if versions.size else (-1, -1)
        return cls(
            row=trajectory.row,
            group=trajectory.group,
            length=len(trajectory),
            num_scored=int(trajectory.sampled[1:].sum()),
            reward=trajectory.reward,
            advantage=trajectory.advantage,
            oldest=oldest,
            newest=newest,
            truncated=trajectory.truncated,
        )


def headers_to_bytes(headers: Sequence[TrajectoryHeader]) -> bytes:
    """Return headers as bytes, `HEADER_BYTES` each."""
    return np.array([tuple(header) for header in headers], _RECORD).tobytes()


def headers_from_bytes(data: bytes) -> list[TrajectoryHeader]:
    """Return the headers that `headers_to_bytes` was given."""
    return [TrajectoryHeader(*values) for values in np.frombuffer(data, _RECORD).tolist()]
