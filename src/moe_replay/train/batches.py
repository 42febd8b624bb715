"""Mini-batches and micro-batches: which sequences are trained together, on which rank, and where their tokens sit.

    trajectories --(updates)--> mini-batches --(ranks)--> shares --(token budget)--> micro-batches

Every rank computes the whole division from the headers of the trajectories, and asks the store for its own share.
Each token has its weight in the whole mini-batch, so the division changes no loss.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_replay.train.backends.base import Backend
from moe_replay.train.losses.aggregation import Aggregation, token_weights
from moe_replay.train.micro_batch import MicroBatch
from moe_replay.train.trajectories.shared_batch import SharedBatch
from moe_replay.train.types import Trajectory

Division = list[list[list[int]]]
"""[data rank][micro-batch] -> indices of sequences."""


@dataclass(frozen=True, slots=True)
class _Update:
    """The share of this rank of one update.

    bins       numbers of the trajectories of each micro-batch
    weights    of a token of each trajectory, by its number
    dummies    micro-batches of weight zero, of the trajectory `shortest`
    """

    bins: list[list[int]]
    weights: dict[int, float]
    dummies: int
    shortest: int


def mini_batches(
    batch: SharedBatch,
    backend: Backend,
    *,
    updates: int,
    aggregation: Aggregation,
    max_tokens: int,
    budget: int,
    packed: bool,
    overlong_filter: bool = False,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of this rank for each of the updates on one rollout batch. All ranks call it.

    A trajectory without a reward, or removed by the overlong filter, is not trained on; in a mean over sequences it
    counts as a sequence without tokens.
    """
    planned = []
    for part in np.array_split(np.arange(len(batch.headers)), updates):
        chosen = [batch.headers[i] for i in part.tolist()]
        excluded = [np.isnan(header.reward) or (overlong_filter and header.truncated) for header in chosen]
        scored = np.array([0 if out else header.num_scored for header, out in zip(chosen, excluded, strict=True)])
        weights = token_weights(scored, aggregation, max_tokens)
        trained = np.flatnonzero(scored)
        division = divide([chosen[i].length for i in trained], backend.data_size, budget, packed=packed)
        count = max((len(share) for share in division), default=0)
        count = -(-count // backend.micro_batch_multiple) * backend.micro_batch_multiple
        bins = [[int(part[trained[i]]) for i in bin_] for bin_ in division[backend.data_rank]]
        shortest = min(trained.tolist(), key=lambda i: chosen[i].length, default=0)
        by_number = {int(part[i]): float(weights[i]) for i in trained.tolist()}
        dummies = count - len(bins) if len(trained) else 0
        planned.append(_Update(bins, by_number, dummies, int(part[shortest]) if len(part) else 0))
    bodies = _bodies(batch, backend, planned)
    made = []
    for update in planned:
        mine = [
            _lay_out([bodies[i] for i in bin_], [update.weights[i] for i in bin_], backend, batch.layers)
            for bin_ in update.bins
        ]
        mine += [dummy_batch(bodies[update.shortest], backend, batch.layers) for _ in range(update.dummies)]
        made.append(mine)
    return made


def _bodies(batch: SharedBatch, backend: Backend, planned: Sequence[_Update]) -> dict[int, Trajectory]:
    """Return the trajectories that this rank needs, by number, with the routes of its layers."""
    numbers = {i for update in planned for bin_ in update.bins for i in bin_}
    numbers |= {update.shortest for update in planned if update.dummies}
    wanted = sorted(numbers)
    return dict(zip(wanted, batch.get(wanted, layers_of(backend)), strict=True))


def layers_of(backend: Backend) -> tuple[int, ...]:
    """Return all layers with a router on this rank."""
    return tuple(sorted(layer for layers in backend.chunk_layers for layer in layers))


def dummy_batch(trajectory: Trajectory, backend: Backend, layers: Sequence[int] | None = None) -> MicroBatch:
    """Return a micro-batch of weight zero: every rank runs as many passes as the busiest one.

    layers   that its routes were recorded for, if it has those of some layers only
    """
    batch = _lay_out([trajectory], [0.0], backend, layers)
    batch.is_dummy = True
    return batch


def _lay_out(
    trajectories: list[Trajectory], weights: list[float], backend: Backend, layers: Sequence[int] | None
) -> MicroBatch:
    layout = backend.layout([len(t) for t in trajectories])
    batch = MicroBatch.of(trajectories, weights, layout, backend.device)
    batch.chunk_layers = backend.chunk_layers
    batch.source_layers = None if layers is None else tuple(layers)
    return batch


def divide(lengths: Sequence[int], ranks: int, budget: int, *, packed: bool) -> Division:
    """Divide sequences over ranks, balanced by tokens, and those of each rank into micro-batches of `budget` tokens.

    A padded micro-batch costs its longest sequence times the number of sequences. A sequence longer than the budget
    gets its own micro-batch.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]  # a heap
    for index in longest_first:
        tokens, rank = load[0]
        shares[rank].append(index)
        heapq.heapreplace(load, (tokens + lengths[index], rank))
    return [_bins(share, lengths, budget, packed=packed) for share in shares]


def _bins(indices: Sequence[int], lengths: Sequence[int], budget: int, *, packed: bool) -> list[list[int]]:
    """Return first-fit bins of `indices`, which come longest first; each bin is in sequence order."""
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
