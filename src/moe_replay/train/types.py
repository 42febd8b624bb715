"""The records of the trainer, in the order a sequence passes through them.

SampledSequence (rollout/types.py) -> Trajectory -> RolloutBatch -> on the way to other ranks EncodedTrajectory and
TrajectoryHeader, there SharedBatch (trajectories/) -> MicroBatch (micro_batch.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np

from moe_replay.errors import AlignmentError
from moe_replay.rollout.sampling_mask import SamplingMask
from moe_replay.rollout.types import FinishReason, SampledSequence
from moe_replay.train.run.completions import Completion


class AnyTrajectory(Protocol):
    """The part of a trajectory that is known before its routes are decoded; see `Trajectory`."""

    @property
    def row(self) -> int: ...

    @property
    def group(self) -> int: ...

    @property
    def reward(self) -> float: ...

    @property
    def advantage(self) -> float: ...

    @property
    def finish_reason(self) -> FinishReason: ...

    @property
    def versions(self) -> np.ndarray: ...

    @property
    def sampling_mask(self) -> SamplingMask | None: ...

    @property
    def sampled(self) -> np.ndarray: ...

    @property
    def truncated(self) -> bool: ...

    def __len__(self) -> int: ...

    def with_advantage(self, advantage: float) -> AnyTrajectory:
        """Return the same trajectory with its advantage."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(SampledSequence):
    """A sampled sequence of T tokens with its place in the rollout batch, its reward and its advantage.

    row         row of the data set
    group       trajectories of the same group answer the same prompt
    reward      NaN where no reward function scored it
    advantage   of every sampled token
    """

    row: int
    group: int
    reward: float = float("nan")
    advantage: float = 0.0

    @classmethod
    def of(cls, sequence: SampledSequence, *, row: int, group: int, reward: float = float("nan")) -> Trajectory:
        """Return the trajectory of a finished sequence, whose weight versions are checked."""
        sampled = {field.name: getattr(sequence, field.name) for field in fields(SampledSequence)}
        trajectory = cls(**sampled, row=row, group=group, reward=float(reward))
        trajectory.check_versions()
        return trajectory

    @property
    def truncated(self) -> bool:
        """Whether the last turn ended at its maximum length."""
        return self.finish_reason is FinishReason.LENGTH

    def with_advantage(self, advantage: float) -> Trajectory:
        """Return the same trajectory with its advantage."""
        return replace(self, advantage=advantage)

    def check_versions(self) -> None:
        """Raise unless each log-prob and the route that led to it come from the same weights.

        The log-prob of token p was computed by the pass over token p - 1, so that token's route must have the weight
        version that sampled p. Earlier tokens may have been routed by earlier weights: they are kept as sampled.
        """
        leading = self.sampled[1:] & self.trace.valid[:-1].any(axis=1)
        wrong = np.flatnonzero(leading & (self.trace.token_versions[:-1] != self.versions[1:]))
        if wrong.size:
            token = int(wrong[0])
            raise AlignmentError(
                "a token was routed by other weights than those its log-prob was computed with",
                sample=f"row {self.row}",
                token=token,
                expected=f"routes of weight version {self.versions[token + 1]}",
                found=f"version {self.trace.token_versions[token]} ({wrong.size} tokens)",
                remedy="Keep routes as_sampled when a sequence is resumed after a weight update",
            )


@dataclass(frozen=True, slots=True)
class Group:
    """The n trajectories of one prompt.

    scores   (n,) by name of the reward function, NaN where it did not score a trajectory
    """

    trajectories: Sequence[AnyTrajectory]
    scores: dict[str, np.ndarray]

    @property
    def rewards(self) -> np.ndarray:
        """(n,) float64: weighted sum of the scores."""
        return np.array([trajectory.reward for trajectory in self.trajectories], np.float64)


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """The trajectories of one training step, the metrics of their rollout, and their texts where they are logged.

    Metrics and completions are those of rank 0, and empty on other ranks.
    """

    trajectories: Sequence[AnyTrajectory]
    metrics: dict[str, float]
    completions: Sequence[Completion] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all trajectories, prompts included."""
        return sum(map(len, self.trajectories))
