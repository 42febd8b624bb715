"""`SharedBatch`: the trajectories of a step as every rank sees them, headers here and bodies in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from moe_replay.train.run.completions import Completion
from moe_replay.train.trajectories.header import TrajectoryHeader, headers_from_bytes, headers_to_bytes
from moe_replay.train.trajectories.store import BatchRef, InProcessStore, TrajectoryStore
from moe_replay.train.types import AnyTrajectory, RolloutBatch, Trajectory


@dataclass(frozen=True, slots=True)
class SharedBatch:
    """The trajectories of one training step, the metrics of their rollout, and their texts where they are logged.

    Metrics and completions are those of rank 0, and empty on other ranks.

    headers   of all trajectories, the same on every rank
    """

    headers: Sequence[TrajectoryHeader]
    ref: BatchRef
    store: TrajectoryStore
    metrics: Mapping[str, float] = field(default_factory=dict)
    completions: Sequence[Completion] = ()

    @classmethod
    def put(cls, batch: RolloutBatch, store: TrajectoryStore) -> Self:
        """Put the trajectories of a rollout into a store, on the rank that sampled them."""
        headers = [TrajectoryHeader.of(trajectory) for trajectory in batch.trajectories]
        return cls(headers, store.put(batch.trajectories), store, batch.metrics, batch.completions)

    @classmethod
    def of(cls, trajectories: Sequence[AnyTrajectory]) -> Self:
        """Return a batch of trajectories of this process."""
        return cls.put(RolloutBatch(trajectories, {}), InProcessStore())

    @property
    def num_tokens(self) -> int:
        """Tokens of all trajectories, prompts included."""
        return sum(header.length for header in self.headers)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers that the routes were recorded for."""
        return self.ref.layers

    def get(self, numbers: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of this rank's layers, which may have more. All ranks call it."""
        return self.store.get(self.ref, numbers, layers)

    def whole(self, numbers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of all layers, on the rank that sampled them."""
        return self.store.whole(self.ref, numbers)

    # ---- to other ranks -----------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return headers and reference, for the ranks that have neither."""
        return self.ref.to_json().encode() + b"\n" + headers_to_bytes(self.headers)

    @classmethod
    def from_bytes(cls, data: bytes, store: TrajectoryStore) -> Self:
        """Return what other ranks know of a batch."""
        ref, _, headers = data.partition(b"\n")
        return cls(headers_from_bytes(headers), BatchRef.from_json(ref.decode()), store)
