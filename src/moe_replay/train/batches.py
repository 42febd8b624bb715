"""Mini-batches and micro-batches: which sequences are trained together, on which rank, and where their tokens sit.

    trajectories --(updates)--> mini-batches --(ranks)--> shares --(token budget)--> micro-batches

Every rank computes the whole division from the lengths alone, so nothing is communicated. Each token has its weight in
the whole mini-batch, so the division changes no loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_replay.train.backends.base import Backend
from moe_replay.train.losses.aggregation import Aggregation, token_weights
from moe_replay.train.micro_batch import MicroBatch
from moe_replay.train.types import Trajectory

Division = list[list[list[int]]]
"""[data rank][micro-batch] -> indices of sequences."""


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
    """Return the micro-batches of this rank for each of the updates on one rollout batch.

    A trajectory without a reward, or removed by the overlong filter, is not trained on; in a mean over sequences it
    counts as a sequence without tokens.
    """
    result = []
    for part in np.array_split(np.arange(len(trajectories)), updates):
        chosen = [trajectories[i] for i in part.tolist()]
        excluded = [np.isnan(t.reward) or (overlong_filter and t.truncated) for t in chosen]
        lengths = np.array([0 if out else int(t.sampled[1:].sum()) for t, out in zip(chosen, excluded, strict=True)])
        weights = token_weights(lengths, aggregation, max_tokens)
        trained = np.flatnonzero(lengths)
        division = divide([len(chosen[i]) for i in trained], backend.data_size, budget, packed=packed)
        count = max((len(share) for share in division), default=0)
        count = -(-count // backend.micro_batch_multiple) * backend.micro_batch_multiple
        mine: list[MicroBatch] = []
        for bin_ in division[backend.data_rank]:
            picked = [int(trained[i]) for i in bin_]
            mine.append(_lay_out([chosen[i] for i in picked], [float(weights[i]) for i in picked], backend))
        if len(trained):
            shortest = chosen[min(trained.tolist(), key=lambda i: len(chosen[i]))]
            mine += [dummy_batch(shortest, backend) for _ in range(count - len(mine))]
        result.append(mine)
    return result


def dummy_batch(trajectory: Trajectory, backend: Backend) -> MicroBatch:
    """Return a micro-batch of weight zero: every rank runs as many passes as the busiest one."""
    batch = _lay_out([trajectory], [0.0], backend)
    batch.is_dummy = True
    return batch


def _lay_out(trajectories: list[Trajectory], weights: list[float], backend: Backend) -> MicroBatch:
    layout = backend.layout([len(t) for t in trajectories])
    return MicroBatch.of(trajectories, weights, layout, backend.device)


def divide(lengths: Sequence[int], ranks: int, budget: int, *, packed: bool) -> Division:
    """Divide sequences over ranks, balanced by tokens, and those of each rank into micro-batches of `budget` tokens.

    A padded micro-batch costs its longest sequence times the number of sequences. A sequence longer than the budget
    gets a micro-batch of its own.
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
