"""`MicroBatch`: sequences that go through the model together, laid out for this rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.rollout.sampling_mask import SamplingMask
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.train.logit_mask import LogitMask
from moe_replay.train.types import Trajectory

ChunkRoutes = dict[int, RouteBatch]
"""Chunk of the policy on this rank -> routes of its layers."""


@dataclass(eq=False, slots=True, kw_only=True)
class MicroBatch:
    """Sequences that go through the model together. (B, W) is what this rank feeds; N sampled tokens are scored.

    layout            token layout of this rank
    input_ids         (B, W) int64; position_ids likewise
    target_positions  (n,) int64: flattened positions of `input_ids` on this rank that predict a sampled token
    target_ids        (n,) int64: the sampled token that each of them predicts
    target_index      (n,) int64: which of the N sampled tokens that is; all N unless context parallel
    sequence          (N,) int64: the trajectory that each sampled token belongs to
    advantages        (N,) float32: advantage of its trajectory
    loss_weights      (N,) float32: weight in the loss of the whole mini-batch
    rollout_logprobs  (N,) float32, as the rollout engine reported them
    logit_mask        supports that the n target tokens were sampled from; None: the whole vocabulary
    old_logprobs      (N,) of the policy before the updates; None until scored
    ref_logprobs      (N,) of the reference model; None until scored, and without one
    rollout_routes    routes that the rollout engine took, of the chunks for which they are kept on the device
    chunk_layers      layers with a router in each chunk of the policy on this rank
    source_layers     all layers that the routes were recorded for; None: those that the trajectories have
    recorded_routes   routes that the policy took in the last pass with `Routing("record")`
    native_routes     routes that the routers chose themselves in the last pass with `observe`
    is_dummy          the batch only keeps this rank in step with busier ones: zero weights, left out of all metrics
    """

    trajectories: tuple[Trajectory, ...]
    layout: TokenLayout
    input_ids: Tensor
    position_ids: Tensor
    target_positions: Tensor
    target_ids: Tensor
    target_index: Tensor
    sequence: Tensor
    advantages: Tensor
    loss_weights: Tensor
    rollout_logprobs: Tensor
    logit_mask: LogitMask | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_routes: ChunkRoutes = field(default_factory=dict)
    recorded_routes: ChunkRoutes = field(default_factory=dict)
    native_routes: ChunkRoutes = field(default_factory=dict)
    is_dummy: bool = False
    chunk_layers: Sequence[Sequence[int]] = ()
    source_layers: tuple[int, ...] | None = None

    @property
    def num_sequences(self) -> int:
        """Number of trajectories."""
        return len(self.trajectories)

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        loss_weights: Sequence[float],
        layout: TokenLayout,
        device: torch.device,
    ) -> MicroBatch:
        """Lay out trajectories; `loss_weights` has the weight of each sampled token of each trajectory."""
        ids = np.concatenate([t.token_ids for t in trajectories]).astype(np.int64)
        position = np.concatenate([np.arange(len(t)) for t in trajectories])
        sequence = np.repeat(np.arange(len(trajectories)), [len(t) for t in trajectories])
        # Token p predicts token p + 1; what follows a sequence's last token belongs to another sequence.
        is_scored = np.concatenate([np.append(t.sampled[1:], False) for t in trajectories])
        target_index = np.cumsum(is_scored) - 1
        next_ids = np.append(ids[1:], 0)

        fed = layout.fed.ravel()
        target_positions = np.flatnonzero((fed != PADDING) & is_scored[fed])
        tokens = fed[target_positions]

        def on_device(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        def per_token(values: Sequence[float]) -> Tensor:
            return on_device(np.asarray(values, np.float32)[sequence[is_scored]], torch.float32)

        shape = layout.fed.shape
        logprobs = np.concatenate([t.logprobs[1:][t.sampled[1:]] for t in trajectories])
        return cls(
            trajectories=tuple(trajectories),
            layout=layout,
            input_ids=on_device(layout.fed_token_ids([t.token_ids for t in trajectories], pad=0), torch.int64),
            position_ids=on_device(np.where(fed == PADDING, 0, position[fed]).reshape(shape), torch.int64),
            target_positions=on_device(target_positions, torch.int64),
            target_ids=on_device(next_ids[tokens], torch.int64),
            target_index=on_device(target_index[tokens], torch.int64),
            sequence=on_device(sequence[is_scored], torch.int64),
            advantages=per_token([t.advantage for t in trajectories]),
            loss_weights=per_token(loss_weights),
            rollout_logprobs=on_device(logprobs, torch.float32),
            logit_mask=_logit_mask(trajectories, tokens + 1, device),
        )

    def add_rollout_routes(self, chunk_layers: Sequence[Sequence[int]]) -> None:
        """Keep the rollout's routes for each chunk of the policy on the device, for several passes."""
        self.chunk_layers = chunk_layers
        self.rollout_routes = {chunk: self.lay_out_routes(chunk) for chunk in range(len(chunk_layers))}

    def lay_out_routes(self, chunk: int) -> RouteBatch:
        """Return the rollout's routes for one chunk of the policy on this rank, on its device: those that are kept,
        or else new ones."""
        if chunk in self.rollout_routes:
            return self.rollout_routes[chunk]
        traces = [trajectory.trace for trajectory in self.trajectories]
        routes = RouteBatch.from_traces(traces, self.layout, self.chunk_layers[chunk], source_layers=self.source_layers)
        return routes.to(self.input_ids.device)


def _logit_mask(trajectories: Sequence[Trajectory], tokens: np.ndarray, device: torch.device) -> LogitMask | None:
    """Return the mask of tokens (n,) of all trajectories, concatenated; None if none of them has one."""
    masks = [trajectory.sampling_mask for trajectory in trajectories]
    known = [mask for mask in masks if mask is not None]
    if not known:
        return None
    if len(known) < len(masks):
        raise AlignmentError(
            "some sequences of a rollout have a sampling mask and others have none",
            sample=f"row {trajectories[masks.index(None)].row}",
            remedy="Sample all of them with the same parameters",
        )
    return LogitMask.of(SamplingMask.concatenate(known).take(tokens), device)
