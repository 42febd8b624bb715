"""Mini-batches and micro-batches: which sequences are trained together, on which rank, and where their tokens sit.

    trajectories --(updates)--> mini-batches --(ranks)--> shares --(token budget)--> micro-batches

Every rank computes the whole division from the headers of the trajectories, and asks the store for its own share.
Each token has its weight in the whole mini-batch, so the division changes no loss.

Where sequences share prompts, whole groups go to a rank as far as the balance allows, and each rank makes its
micro-batches of what it has got (`sharing.py`): which tokens and routes are the same shows in the bodies alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_replay.distributed.collectives import all_gather, control_group
from moe_replay.errors import AlignmentError
from moe_replay.records import MicroBatch, RolloutBatch, Trajectory, TrajectoryHeader
from moe_replay.routes.layout import PADDING, Prefix, TokenLayout
from moe_replay.sampling_mask import LogitMask, SamplingMask
from moe_replay.train.backends.base import Backend
from moe_replay.train.learn.losses import Aggregation, token_weights
from moe_replay.train.learn.sharing import Sharing, Tree, balanced, divide_groups, shared_bins
from moe_replay.train.trajectories.store import TrajectoryStore

Division = list[list[list[int]]]
"""[data rank][micro-batch] -> indices of sequences."""


@dataclass(frozen=True, slots=True)
class _Update:
    """This rank's part of one update.

    bins       indices of the trajectories of each micro-batch; where prompts are shared, all of them
    weights    of a token of each trajectory, by its index
    count      micro-batches of every rank; 0: not known yet
    shortest   trajectory of the micro-batches of weight zero that are added
    """

    bins: list[list[int]]
    weights: dict[int, float]
    count: int
    shortest: int


def mini_batches(
    batch: RolloutBatch,
    store: TrajectoryStore,
    backend: Backend,
    *,
    updates: int,
    aggregation: Aggregation,
    max_tokens: int,
    budget: int,
    packed: bool,
    overlong_filter: bool = False,
    sharing: Sharing | None = None,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of this rank for each of the updates on one rollout batch. All ranks call it.

    The trajectories of an episode are in one mini-batch, and count as one sequence. An episode without a reward, or
    removed by the overlong filter, is not trained on; in a mean over sequences it counts as one without tokens.

    sharing   what sequences must have in common to share a prompt; None: every sequence is fed whole
    """
    planned = []
    episodes = episodes_of(batch.headers)
    for numbers in np.array_split(np.arange(len(episodes)), updates):
        own = [episodes[number] for number in numbers.tolist()]
        part = np.array([i for episode in own for i in episode], np.int64)
        chosen = [batch.headers[i] for i in part.tolist()]
        by_episode = [_scored_tokens(batch.headers, episode, overlong_filter=overlong_filter) for episode in own]
        scored = np.array([tokens for parts in by_episode for tokens in parts], np.int64)
        weights = np.repeat(
            token_weights(np.array(list(map(sum, by_episode))), aggregation, max_tokens), list(map(len, by_episode))
        )
        trained = np.flatnonzero(scored)
        if sharing is None:
            division = divide([chosen[i].length for i in trained], backend.data_size, budget, packed=packed)
            count = _rounded(max((len(share) for share in division), default=0), backend)
            bins = division[backend.data_rank]
        else:
            count = 0
            bins = [divide_groups([chosen[i] for i in trained], backend.data_size, budget)[backend.data_rank]]
        bins = [[int(part[trained[i]]) for i in bin_] for bin_ in bins]
        shortest = min(trained.tolist(), key=lambda i: chosen[i].length, default=0)
        by_index = {int(part[i]): float(weights[i]) for i in trained.tolist()}
        planned.append(_Update(bins, by_index, count, int(part[shortest]) if len(part) else 0))
    bodies = _bodies(batch, store, backend, planned)
    trees = [[Tree.apart(bin_) for bin_ in update.bins] for update in planned]
    counts = [update.count for update in planned]
    if sharing is not None:
        trees = [shared_bins(update.bins[0], bodies, budget, sharing) for update in planned]
        counts = _most([len(bins) for bins in trees], backend)
    return [
        _lay_out_update(update, bins, count, bodies, backend, batch.layers)
        for update, bins, count in zip(planned, trees, counts, strict=True)
    ]


def _lay_out_update(
    update: _Update,
    bins: Sequence[Tree],
    count: int,
    bodies: Mapping[int, Trajectory],
    backend: Backend,
    layers: Sequence[int],
) -> list[MicroBatch]:
    """Return the micro-batches of an update, as many as the busiest rank has."""
    batches = []
    for bin_ in bins:
        weights = [update.weights[i] for i in bin_.indices]
        batches.append(_lay_out([bodies[i] for i in bin_.indices], weights, backend, layers, bin_.prefixes))
    if update.weights:
        batches += [dummy_batch(bodies[update.shortest], backend, layers) for _ in range(count - len(bins))]
    return batches


def _most(counts: Sequence[int], backend: Backend) -> list[int]:
    """Return the largest of each of the counts of micro-batches over all ranks. Collective."""
    most = np.array(counts, np.int64)
    if backend.data_size > 1:
        most = np.stack([part.view(np.int64) for part in all_gather(most.view(np.uint8), control_group())]).max(0)
    return [_rounded(count, backend) for count in most.tolist()]


def _rounded(count: int, backend: Backend) -> int:
    return -(-count // backend.micro_batch_multiple) * backend.micro_batch_multiple


def episodes_of(trajectories: Sequence[Trajectory] | Sequence[TrajectoryHeader]) -> list[list[int]]:
    """Return the indices of the trajectories of each episode, in order."""
    episodes: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(trajectories):
        episodes.setdefault((one.group, one.episode) if one.episode >= 0 else (index,), []).append(index)
    return list(episodes.values())


def _scored_tokens(headers: Sequence[TrajectoryHeader], episode: Sequence[int], *, overlong_filter: bool) -> list[int]:
    """Return the number of tokens that are trained on, of each trajectory of an episode; the last may be truncated."""
    last = headers[episode[-1]]
    is_out = np.isnan(last.reward) or (overlong_filter and last.truncated)
    return [0 if is_out else headers[i].num_scored for i in episode]


def _bodies(
    batch: RolloutBatch, store: TrajectoryStore, backend: Backend, planned: Sequence[_Update]
) -> dict[int, Trajectory]:
    """Return the trajectories that this rank needs, by index, with the routes of its layers."""
    indices = {i for update in planned for bin_ in update.bins for i in bin_}
    indices |= {update.shortest for update in planned if update.weights and update.count != len(update.bins)}
    ordered = sorted(indices)
    return dict(zip(ordered, store.get(batch, ordered, layers_of(backend)), strict=True))


def layers_of(backend: Backend) -> tuple[int, ...]:
    return tuple(sorted(layer for layers in backend.chunk_layers for layer in layers))


def dummy_batch(trajectory: Trajectory, backend: Backend, layers: Sequence[int] | None = None) -> MicroBatch:
    """Return a micro-batch of weight zero: every rank runs as many passes as the busiest one.

    layers   that its routes were recorded for, if it has those of some layers only
    """
    batch = _lay_out([trajectory], [0.0], backend, layers)
    batch.is_dummy = True
    return batch


def _lay_out(
    trajectories: list[Trajectory],
    weights: list[float],
    backend: Backend,
    layers: Sequence[int] | None,
    prefixes: Sequence[Prefix] = (),
) -> MicroBatch:
    lengths = [len(t) for t in trajectories]
    layout = backend.layout(lengths, prefixes) if prefixes else backend.layout(lengths)
    batch = make_micro_batch(trajectories, weights, layout, backend.device)
    batch.chunk_layers = backend.chunk_layers
    batch.source_layers = None if layers is None else tuple(layers)
    return batch


def make_micro_batch(
    trajectories: Sequence[Trajectory], loss_weights: Sequence[float], layout: TokenLayout, device: torch.device
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
    # A token that sequences share is scored once for each of them: it may precede another token in each.
    tokens = np.flatnonzero(is_scored & (layout.place != PADDING))
    tokens = tokens[np.argsort(layout.place[tokens], kind="stable")]
    target_positions = layout.place[tokens]

    def on_device(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    def per_token(values: Sequence[float]) -> Tensor:
        return on_device(np.asarray(values, np.float32)[sequence[is_scored]], torch.float32)

    shape = layout.fed.shape
    logprobs = np.concatenate([t.logprobs[1:][t.sampled[1:]] for t in trajectories])
    return MicroBatch(
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


def _logit_mask(trajectories: Sequence[Trajectory], tokens: np.ndarray, device: torch.device) -> LogitMask | None:
    """Return the mask of tokens (n,) of all trajectories, concatenated; None if none of them has one."""
    masks = [trajectory.sampling_mask for trajectory in trajectories]
    present = [mask for mask in masks if mask is not None]
    if not present:
        return None
    if len(present) < len(masks):
        raise AlignmentError(
            "some sequences of a rollout have a sampling mask and others have none",
            sample=f"row {trajectories[masks.index(None)].row}",
            remedy="Sample all of them with the same parameters",
        )
    return LogitMask.of(SamplingMask.concatenate(present).take(tokens), device)


def divide(lengths: Sequence[int], ranks: int, budget: int, *, packed: bool) -> Division:
    """Divide sequences over ranks, balanced by tokens, and those of each rank into micro-batches of `budget` tokens.

    A padded micro-batch costs its longest sequence times the number of sequences. A sequence longer than the budget
    gets its own micro-batch.
    """
    return [_bins(share, lengths, budget, packed=packed) for share in balanced(lengths, ranks)]


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
