"""Mini-batches and micro-batches: which sequences are trained together, on which rank, and where their tokens sit.

    trajectories --(updates)--> mini-batches --(ranks)--> shares --(token budget)--> micro-batches

Every rank computes the whole division from the lengths alone, so nothing is communicated. Each token has its weight in
the whole mini-batch, so the division changes no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.train.backends.base import Backend
from moe_replay.train.losses import Aggregation, token_weights
from moe_replay.train.trajectory import Trajectory

Division = list[list[list[int]]]
"""[data rank][micro-batch] -> indices of sequences."""


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


def mini_batches(
    trajectories: Sequence[Trajectory],
    backend: Backend,
    *,
    updates: int,
    aggregation: Aggregation,
    max_tokens: int,
    budget: int,
    packed: bool,
    overlong_filter: bool = False,
) -> list[list[MicroBatch]]:
    """The micro-batches of this rank for each of the updates of one rollout.

    A trajectory that nobody scored, or that the overlong filter takes out, is not trained on; it counts as a sequence
    without tokens in the mean over sequences.
    """
    made = []
    for part in np.array_split(np.arange(len(trajectories)), updates):
        chosen = [trajectories[i] for i in part.tolist()]
        out = [np.isnan(t.reward) or (overlong_filter and t.truncated) for t in chosen]
        lengths = np.array([0 if left else int(t.sampled[1:].sum()) for t, left in zip(chosen, out, strict=True)])
        weights = token_weights(lengths, aggregation, max_tokens)
        trained = np.flatnonzero(lengths)
        division = divide([len(chosen[i]) for i in trained], backend.data_size, budget, packed=packed)
        count = max((len(share) for share in division), default=0)
        count = -(-count // backend.micro_batch_multiple) * backend.micro_batch_multiple
        mine: list[MicroBatch] = []
        for bin_ in division[backend.data_rank]:
            picked = [int(trained[i]) for i in bin_]
            mine.append(_laid_out([chosen[i] for i in picked], [float(weights[i]) for i in picked], backend))
        if len(trained):
            shortest = chosen[min(trained.tolist(), key=lambda i: len(chosen[i]))]
            mine += [filler(shortest, backend) for _ in range(count - len(mine))]
        made.append(mine)
    return made


def filler(trajectory: Trajectory, backend: Backend) -> MicroBatch:
    """A micro-batch that changes no loss: every rank runs as many passes as the busiest one."""
    batch = _laid_out([trajectory], [0.0], backend)
    batch.filler = True
    return batch


def _laid_out(trajectories: list[Trajectory], weights: list[float], backend: Backend) -> MicroBatch:
    layout = backend.layout([len(t) for t in trajectories])
    return MicroBatch.of(trajectories, weights, layout, backend.device)


def divide(lengths: Sequence[int], ranks: int, budget: int, *, packed: bool) -> Division:
    """Sequences to ranks, evenly by tokens, and of each rank to micro-batches of at most `budget` tokens.

    A padded micro-batch costs its longest sequence times their number. A sequence that is longer than the budget has a
    micro-batch of its own.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    load = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in longest_first:
        rank = min(range(ranks), key=lambda r: (load[r], r))
        shares[rank].append(index)
        load[rank] += lengths[index]
    return [_bins(share, lengths, budget, packed=packed) for share in shares]


def _bins(indices: Sequence[int], lengths: Sequence[int], budget: int, *, packed: bool) -> list[list[int]]:
    """First fit, longest first; in the order of the sequences inside each."""
    bins: list[list[int]] = []
    for index in indices:
        for bin_ in bins:
            longest = lengths[bin_[0]]  # the first is the longest
            used = sum(lengths[i] for i in bin_) if packed else longest * len(bin_)
            if used + (lengths[index] if packed else longest) <= budget:
                bin_.append(index)
                break
        else:
            bins.append([index])
    return [sorted(bin_) for bin_ in bins]
