"""`MicroBatch`: sequences that go through the model together, laid out for this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.train.trajectory import Trajectory


@dataclass(eq=False, slots=True, kw_only=True)
class MicroBatch:
    """Sequences that go through the model together. (B, W) is what this rank feeds; N tokens are scored.

    layout         of this rank
    input_ids      (B, W) int64, position_ids alike
    places         (n,) int64: of the fed places, flattened, those of this rank whose next token is scored
    targets        (n,) int64: the token that follows each
    slots          (n,) int64: which of the N scored tokens that is; all of them unless context is parallel
    sequence       (N,) int64: which of the trajectories the scored token belongs to
    rollout        (N,) log-prob that the engine reported
    advantages     (N,) of its trajectory
    weights        (N,) in the loss of the whole mini-batch
    old, reference (N,) log-probs, once they are known
    routes         for each chunk of the policy on this rank: what is replayed, once it is known
    native         for each chunk: what the routers would have chosen in the last pass that observed it
    filler         it keeps this rank in step with busier ones: its tokens weigh nothing and count nowhere
    """

    trajectories: tuple[Trajectory, ...]
    layout: TokenLayout
    input_ids: Tensor
    position_ids: Tensor
    places: Tensor
    targets: Tensor
    slots: Tensor
    sequence: Tensor
    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    routes: dict[int, RouteBatch] = field(default_factory=dict)
    native: dict[int, RouteBatch] = field(default_factory=dict)
    filler: bool = False

    @property
    def num_sequences(self) -> int:
        """Trajectories in this micro-batch."""
        return len(self.trajectories)

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        token_weight: Sequence[float],
        layout: TokenLayout,
        device: torch.device,
    ) -> MicroBatch:
        """Lay sequences out; `token_weight` is the weight of each scored token of each sequence."""
        ids = np.concatenate([t.token_ids for t in trajectories]).astype(np.int64)
        position = np.concatenate([np.arange(len(t)) for t in trajectories])
        of_sequence = np.repeat(np.arange(len(trajectories)), [len(t) for t in trajectories])
        # The pass over token p scores token p + 1; what follows a sequence's last token is another sequence.
        scored = np.concatenate([np.append(t.sampled[1:], False) for t in trajectories])
        slot = np.cumsum(scored) - 1
        predicted = np.append(ids[1:], 0)

        fed = layout.fed.ravel()
        places = np.flatnonzero((fed != PADDING) & scored[fed])
        tokens = fed[places]

        def on_device(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        def of_scored(values: Sequence[float]) -> Tensor:
            return on_device(np.asarray(values, np.float32)[of_sequence[scored]], torch.float32)

        shape = layout.fed.shape
        return cls(
            trajectories=tuple(trajectories),
            layout=layout,
            input_ids=on_device(layout.fed_token_ids([t.token_ids for t in trajectories], pad=0), torch.int64),
            position_ids=on_device(np.where(fed == PADDING, 0, position[fed]).reshape(shape), torch.int64),
            places=on_device(places, torch.int64),
            targets=on_device(predicted[tokens], torch.int64),
            slots=on_device(slot[tokens], torch.int64),
            sequence=on_device(of_sequence[scored], torch.int64),
            rollout=on_device(np.concatenate([t.logprobs[1:][t.sampled[1:]] for t in trajectories]), torch.float32),
            advantages=of_scored([t.advantage for t in trajectories]),
            weights=of_scored(token_weight),
        )

    def rollout_routes(self, chunk_layers: Sequence[Sequence[int]]) -> dict[int, RouteBatch]:
        """What the rollout recorded, for each chunk of the policy on this rank."""
        traces = [trajectory.trace for trajectory in self.trajectories]
        return {
            chunk: RouteBatch.from_traces(traces, self.layout, layers).to(self.input_ids.device)
            for chunk, layers in enumerate(chunk_layers)
        }
