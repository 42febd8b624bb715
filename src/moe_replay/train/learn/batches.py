"""Mini-batches and micro-batches: which sequences are trained together, on which rank, and where their tokens sit.

    trajectories --(updates)--> mini-batches --(ranks)--> shares --(token budget)--> micro-batches

Every rank computes the whole division from the headers of the trajectories, and asks the store for its own share.
Each token has its weight in the whole mini-batch, so the division changes no loss.

With `batch.balance = "experts"` that is where they start from, and `balance.py` exchanges some of them.

Where sequences share prompts, whole groups go to a rank as far as the balance allows, and each rank makes its
micro-batches of what it has got (`sharing.py`): which tokens and routes are the same shows in the bodies alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_replay.distributed.ranks import all_gather_json
from moe_replay.errors import AlignmentError
from moe_replay.records import MicroBatch, RolloutBatch, Trajectory, TrajectoryHeader
from moe_replay.routes.layout import PADDING, Prefix, TokenLayout
from moe_replay.sampling_mask import LogitMask, SamplingMask
from moe_replay.train.backends.base import Backend
from moe_replay.train.learn.balance import Division, ExpertBalance
from moe_replay.train.learn.losses import Aggregation, token_weights
from moe_replay.train.learn.sharing import Sharing, Tree, balanced, divide_groups, joined, shared_bins, tree_again
from moe_replay.train.trajectories.store import TrajectoryStore
from moe_replay.utils.device import to_device


@dataclass(slots=True)
class _Update:
    """This rank's part of one update.

    bins       trees of the trajectories of each micro-batch, by index; an empty one has the weight zero
    weights    of a token of each trajectory, by its index
    count      micro-batches of every rank
    shortest   trajectory of the micro-batches of weight zero
    """

    bins: list[list[Tree]]
    weights: dict[int, float]
    count: int
    shortest: int

    @property
    def indices(self) -> set[int]:
        """Trajectories that this rank needs."""
        needed = {i for bin_ in self.bins for tree in bin_ for i in tree.indices}
        lacks = self.weights and (self.count != len(self.bins) or not all(self.bins))
        return needed | {self.shortest} if lacks else needed


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
    balance: ExpertBalance | None = None,
) -> list[list[MicroBatch]]:
    """Return the micro-batches of this rank for each of the updates on one rollout batch. All ranks call it.

    The trajectories of an episode are in one mini-batch, and count as one sequence. An episode without a reward, or
    removed by the overlong filter, is not trained on; in a mean over sequences it counts as one without tokens.

    sharing   what sequences must have in common to share a prompt; None: every sequence is fed whole
    balance   divides sequences by the loads of experts too; None: by tokens alone
    """
    planned = []
    episodes = episodes_of(batch.headers)
    for numbers in np.array_split(np.arange(len(episodes)), updates):
        part_episodes = [episodes[number] for number in numbers.tolist()]
        part = [i for episode in part_episodes for i in episode]
        by_episode = [
            _scored_tokens(batch.headers, episode, overlong_filter=overlong_filter) for episode in part_episodes
        ]
        scored = [tokens for parts in by_episode for tokens in parts]
        weights = np.repeat(
            token_weights(np.array(list(map(sum, by_episode))), aggregation, max_tokens), list(map(len, by_episode))
        )
        by_index = {i: float(weight) for i, weight, tokens in zip(part, weights, scored, strict=True) if tokens}
        planned.append(
            _plan_update(batch.headers, by_index, backend, budget, packed=packed, shares=sharing is not None)
        )
    bodies: dict[int, Trajectory] = {}
    _fetch(bodies, batch, store, backend, planned)
    if sharing is not None:
        for update in planned:
            indices = [i for bin_ in update.bins for tree in bin_ for i in tree.indices]
            update.bins = shared_bins(indices, bodies, budget, sharing)
        for update, count in zip(planned, _most([len(update.bins) for update in planned], backend), strict=True):
            update.count = count
    if balance is not None:
        divided = balance.divide([update.bins for update in planned], bodies, batch.layers, budget, packed=packed)
        for update, bins in zip(planned, divided, strict=True):
            update.bins = bins
        _fetch(bodies, batch, store, backend, planned)
        if sharing is not None:
            for update in planned:
                update.bins = [[tree_again(tree, bodies, budget, sharing) for tree in bin_] for bin_ in update.bins]
    return [_lay_out_update(update, bodies, backend, batch.layers) for update in planned]


def _plan_update(
    headers: Sequence[TrajectoryHeader],
    weights: dict[int, float],
    backend: Backend,
    budget: int,
    *,
    packed: bool,
    shares: bool,
) -> _Update:
    """Divide the trajectories that have a weight by tokens; with `shares`, over ranks alone."""
    trained = list(weights)
    chosen = [headers[i] for i in trained]
    if shares:
        count = 0
        bins = [divide_groups(chosen, backend.data_size, budget)[backend.data_rank]]
    else:
        division = divide([header.length for header in chosen], backend.data_size, budget, packed=packed)
        count = _rounded(max((len(share) for share in division), default=0), backend)
        bins = division[backend.data_rank]
    trees = [[Tree.single(trained[i], chosen[i].length) for i in bin_] for bin_ in bins]
    return _Update(trees, weights, count, min(trained, key=lambda i: headers[i].length, default=0))


def _lay_out_update(
    update: _Update, bodies: Mapping[int, Trajectory], backend: Backend, layers: Sequence[int]
) -> list[MicroBatch]:
    """Return the micro-batches of an update, as many as the busiest rank has."""
    if not update.weights:
        return []
    batches = []
    for trees in [*update.bins, *([] for _ in range(update.count - len(update.bins)))]:
        if not trees:
            batches.append(dummy_batch(bodies[update.shortest], backend, layers))
            continue
        bin_ = joined(trees)
        weights = [update.weights[i] for i in bin_.indices]
        batches.append(_lay_out([bodies[i] for i in bin_.indices], weights, backend, layers, bin_.prefixes))
    return batches


def _most(counts: Sequence[int], backend: Backend) -> list[int]:
    """Return the largest of each of the counts of micro-batches over all ranks. Collective."""
    return [_rounded(max(of_ranks), backend) for of_ranks in zip(*all_gather_json(counts), strict=True)]


def _rounded(count: int, backend: Backend) -> int:
    return -(-count // backend.micro_batch_multiple) * backend.micro_batch_multiple


def episodes_of(trajectories: Sequence[Trajectory] | Sequence[TrajectoryHeader]) -> list[list[int]]:
    """Return the indices of the trajectories of each episode, in order."""
    episodes: dict[tuple[int, ...], list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        key = (trajectory.group, trajectory.episode) if trajectory.episode >= 0 else (index,)
        episodes.setdefault(key, []).append(index)
    return list(episodes.values())


def _scored_tokens(headers: Sequence[TrajectoryHeader], episode: Sequence[int], *, overlong_filter: bool) -> list[int]:
    """Return the number of tokens that are trained on, of each trajectory of an episode; the last may be truncated."""
    last = headers[episode[-1]]
    is_out = np.isnan(last.reward) or (overlong_filter and last.truncated)
    return [0 if is_out else headers[i].num_scored for i in episode]


def _fetch(
    bodies: dict[int, Trajectory],
    batch: RolloutBatch,
    store: TrajectoryStore,
    backend: Backend,
    planned: Sequence[_Update],
) -> None:
    """Add the trajectories that this rank needs and does not have, by index, with the routes of its layers."""
    needed = {i for update in planned for i in update.indices} - bodies.keys()
    ordered = sorted(needed)
    bodies.update(zip(ordered, store.get(batch, ordered, layers_of(backend)), strict=True))


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
        return to_device(values, device).to(dtype)

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


def has_route(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return (N,) bool: whether the token that predicts each sampled token has a route, in any layer."""
    return np.asarray(np.concatenate([t.trace.valid[:-1][t.sampled[1:]] for t in trajectories]).any(axis=1))


def target_rows(batch: MicroBatch) -> Tensor:
    """Return (n,) the row of the routers on this rank that each target is predicted in."""
    if batch.layout.order == "batch":
        return batch.target_positions
    sequences, width = batch.layout.fed.shape
    return batch.target_positions % width * sequences + batch.target_positions // width


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
