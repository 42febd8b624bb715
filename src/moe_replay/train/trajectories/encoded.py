"""`EncodedTrajectory`: a trajectory as a driver process has encoded it; the rank that trains on it decodes its routes.

A trajectory of this process and an encoded one are put into a store alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from moe_replay.rollout.sampling_mask import SamplingMask
from moe_replay.rollout.types import NOT_SAMPLED, FinishReason
from moe_replay.train.trajectories.wire import Buffers, Record, read_record, record_parts, with_advantage
from moe_replay.train.types import AnyTrajectory, Trajectory

Layers = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedTrajectory:
    """A trajectory of T tokens in shared memory.

    records   by the set of layers whose routes are in the record; None: all of them
    layers    that its routes were recorded for
    texts     of prompt and completion, special tokens included; None: they are not logged
    """

    records: Mapping[Layers | None, memoryview]
    layers: Layers
    advantage: float = 0.0
    texts: tuple[str, str] | None = None

    @cached_property
    def _record(self) -> Record:
        return Record.of(next(iter(self.records.values())))

    def __len__(self) -> int:
        return self._record.length

    @property
    def row(self) -> int:
        return self._record.row

    @property
    def group(self) -> int:
        return self._record.group

    @property
    def reward(self) -> float:
        return self._record.reward

    @property
    def finish_reason(self) -> FinishReason:
        return self._record.finish_reason

    @property
    def truncated(self) -> bool:
        """Whether the last turn ended at its maximum length."""
        return self.finish_reason is FinishReason.LENGTH

    @cached_property
    def versions(self) -> np.ndarray:
        """(T,) int64: weight version that sampled the token, `NOT_SAMPLED` for prompt and observations."""
        return self._record.versions

    @property
    def sampled(self) -> np.ndarray:
        """(T,) bool: tokens that the model sampled."""
        return self.versions != NOT_SAMPLED

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The support of each token, where there is one."""
        return self._record.sampling_mask

    def with_advantage(self, advantage: float) -> Self:
        """Return the same trajectory with its advantage."""
        return replace(self, advantage=advantage)

    def decode(self) -> Trajectory:
        """Return the trajectory with the routes of all layers, whose rows are not checked yet."""
        return replace(read_record(self.records[None]), advantage=self.advantage)


def recorded_layers(trajectory: AnyTrajectory) -> Layers:
    """Return the layers that the routes of a trajectory were recorded for."""
    if isinstance(trajectory, EncodedTrajectory):
        return trajectory.layers
    assert isinstance(trajectory, Trajectory)
    return trajectory.trace.layers


def parts_of(trajectory: AnyTrajectory, layers: Sequence[int]) -> Buffers:
    """Return the record of a trajectory with the routes of some layers, as buffers."""
    if isinstance(trajectory, EncodedTrajectory):
        return with_advantage(trajectory.records[tuple(layers)], trajectory.advantage)
    assert isinstance(trajectory, Trajectory)
    return record_parts(trajectory, layers)


def decoded(trajectory: AnyTrajectory) -> Trajectory:
    """Return a trajectory with its routes."""
    if isinstance(trajectory, EncodedTrajectory):
        return trajectory.decode()
    assert isinstance(trajectory, Trajectory)
    return trajectory
