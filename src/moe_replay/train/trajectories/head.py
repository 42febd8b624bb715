"""`TrajectoryHead`: what every rank must know of every trajectory of a step, to divide them alike."""

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
HEAD_BYTES = _RECORD.itemsize


class TrajectoryHead(NamedTuple):
    """The head of a trajectory of `length` tokens.

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
        """Return the head of a trajectory."""
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


def heads_to_bytes(heads: Sequence[TrajectoryHead]) -> bytes:
    """Return heads as bytes, `HEAD_BYTES` each."""
    return np.array([tuple(head) for head in heads], _RECORD).tobytes()


def heads_from_bytes(data: bytes) -> list[TrajectoryHead]:
    """Return the heads that `heads_to_bytes` was given."""
    return [TrajectoryHead(*values) for values in np.frombuffer(data, _RECORD).tolist()]
