"""Micro-batches whose expert-parallel ranks have about as much work each (`batch.balance = "experts"`).

Routes say, before anything is computed, how many rows of each sample go to the experts of each expert-parallel rank.
The ranks of an exchange wait in every layer for the busiest of them, so a micro-batch costs, summed over layers, the
rows of its busiest rank. Pairs of samples change places between the micro-batches and data ranks of one update where
that makes it less: the samples of an update, and so its gradient, stay the same.

Units are the samples that must stay together: one sample, or the samples that share a prompt (`sharing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe_replay.distributed.collectives import all_gather, control_group
from moe_replay.distributed.ranks import all_gather_json, from_rank_0, world_size
from moe_replay.records import Trajectory
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.backends.base import Backend
from moe_replay.train.learn.sharing import Tree

Division = list[list[list[int]]]
"""[data rank][micro-batch] -> indices of sequences, or of units."""
Bins = list[list[Tree]]
"""Units of each micro-batch of a rank."""
Indices = list[list[list[list[int]]]]
"""[data rank][micro-batch][unit] -> indices of its sequences."""

LOAD, LOAD_BY_TOKENS, LOAD_LIMIT = "batch/ep_load", "batch/ep_load_by_tokens", "batch/ep_load_limit"

EVEN = 0.1
"""Weight of the norm over all ranks beside the rows of the busiest one."""
TRIED = 16
"""Exchanges of two units that are computed for a pair of slots in a round; the best one is made."""
ROUND = 2**24
"""Numbers that a round computes at most, which bounds its memory."""
ROUNDS, CHECKED_EVERY = 4096, 64
WORK = 2**29
"""Numbers that all rounds compute at most, so that a step of very many samples does not wait long."""
CLOSE = 1.001
"""Relative to the best that any division can reach: close enough to stop."""
LEAST = 2e-5
"""Decrease of the busiest ranks' rows, over `CHECKED_EVERY` rounds, below which the search stops."""


class Loads(NamedTuple):
    """Rows of the busiest expert-parallel rank, and of the mean rank, summed over layers and micro-batches."""

    busiest: float
    mean: float

    @property
    def ratio(self) -> float:
        return self.busiest / self.mean if self.mean else 1.0

    def __add__(self, other: tuple[object, ...]) -> Loads:
        assert isinstance(other, Loads)
        return Loads(self.busiest + other.busiest, self.mean + other.mean)


@dataclass(frozen=True)
class Units:
    """Samples to divide, N units.

    tokens   (N,) int64 that each feeds; shared ones once
    rows     (N, L, P) float32: how many go to the experts of each of P expert-parallel ranks, in each layer
    """

    tokens: np.ndarray
    rows: np.ndarray


def expert_rows(trace: RouteTrace, ranks: int, num_experts: int, start: int = 0) -> np.ndarray:
    """Return (L, ranks) int64: rows of the tokens from `start` on for the experts of each rank, where there are routes.

    Rank r has the experts [r E / ranks, (r + 1) E / ranks).
    """
    ids, valid = trace.routed_experts[start:], trace.valid[start:]
    counts = np.stack(
        [
            np.bincount(np.ascontiguousarray(ids[:, layer]).ravel(), minlength=num_experts)
            for layer in range(ids.shape[1])
        ]
    )
    counts[:, 0] -= trace.top_k * (~valid).sum(0)  # rows without a route hold zeros
    return counts.reshape(len(counts), ranks, -1).sum(2)


def spread_evenly(rows: np.ndarray, tokens: np.ndarray, top_k: int) -> np.ndarray:
    """Add to rows (N, L, P) those of tokens without a route, as float32: each rank is taken to get as many."""
    missing = tokens[:, None] * top_k - rows.sum(2)
    return (rows + np.maximum(missing, 0)[:, :, None] / rows.shape[2]).astype(np.float32)


def loads_of(division: Division, units: Units, width: int) -> Loads:
    """Return the loads of a division; `width` consecutive data ranks exchange tokens in each micro-batch."""
    by_exchange = _exchange_rows(division, units, width)
    return Loads(float(by_exchange.max(2).sum()), float(by_exchange.mean(2).sum()))


def layer_ratios(division: Division, units: Units, width: int) -> np.ndarray:
    """Return (L,): the busiest rank relative to the mean one in each layer, over all micro-batches."""
    by_exchange = _exchange_rows(division, units, width)
    mean = by_exchange.mean(2).sum(0)
    return np.divide(by_exchange.max(2).sum(0), mean, out=np.ones_like(mean), where=mean > 0)


def best_possible(units: Units) -> Loads:
    """Return the loads if every micro-batch had the same mix of samples: what no division can go below."""
    total = units.rows.sum(0, dtype=np.float64)
    return Loads(float(total.max(1).sum()), float(total.mean(1).sum()))


def _exchange_rows(division: Division, units: Units, width: int) -> np.ndarray:
    """(exchanges x micro-batches, L, P) float64."""
    count = max(map(len, division), default=0)
    rows = np.zeros((-(-len(division) // width) * count, *units.rows.shape[1:]))
    for rank, share in enumerate(division):
        for number, bin_ in enumerate(share):
            rows[rank // width * count + number] += units.rows[bin_].sum(0, dtype=np.float64)
    return rows


def widest_tokens(division: Division, units: Units, width: int, *, packed: bool) -> int:
    """Return the tokens of the fullest data rank of each exchange, padding included, summed over micro-batches."""
    tokens = [
        [_fed(units.tokens[bin_], packed=packed) for bin_ in share] + [0] * (max(map(len, division)) - len(share))
        for share in division
    ]
    return sum(int(np.max(tokens[first : first + width], axis=0).sum()) for first in range(0, len(tokens), width))


def _fed(tokens: np.ndarray, *, packed: bool) -> int:
    return 0 if not len(tokens) else int(tokens.sum() if packed else tokens.max() * len(tokens))


def rows_of_a_token(units: Units, width: int) -> float:
    """Return how many rows of the busiest expert-parallel rank take as long as a token does outside of experts.

    With equal loads, experts are taken for half of a pass: as many as a rank gets for each token of a data rank.
    """
    return float(units.rows.sum(dtype=np.float64) / max(units.tokens.sum(), 1) / units.rows.shape[2] * width)


def balanced_division(division: Division, units: Units, width: int, budget: int, *, packed: bool) -> Division:
    """Return a division whose busiest expert-parallel ranks have fewer rows than those of `division`, or that division.

    No micro-batch gets more tokens than the budget, and what is saved in experts is more than what the fullest data
    ranks may lose elsewhere (`rows_of_a_token`). A unit beyond the budget stays where it is. The result depends on the
    arguments alone.
    """
    count = max(map(len, division), default=0)
    if len(division) // width * count < 2 or units.rows.size == 0:
        return division
    search = _Search(division, units, width, budget, packed=packed)
    search.run(CLOSE * best_possible(units).busiest)
    candidate = search.division()
    token = rows_of_a_token(units, width)
    saved = loads_of(division, units, width).busiest - loads_of(candidate, units, width).busiest
    lost = widest_tokens(candidate, units, width, packed=packed) - widest_tokens(division, units, width, packed=packed)
    return candidate if saved > max(lost * token, 0) else division


class _Search:
    """Random exchanges of two units, of which those are made that lower the cost of experts and that of the pass.

    A bin is a micro-batch of one data rank, a slot the bins that exchange tokens (S slots of W bins). In each round the
    slots meet in random pairs. Every bin has a free place more than units: to exchange that one is to move a unit.
    """

    def __init__(self, division: Division, units: Units, width: int, budget: int, *, packed: bool) -> None:
        self._none = len(units.tokens)  # the unit in a free place
        self._tokens = np.append(units.tokens, 0)
        self._rows = np.concatenate([units.rows, np.zeros_like(units.rows[:1])])
        self._count = max(map(len, division))
        places = max(len(bin_) for share in division for bin_ in share) + 1
        self._held = np.full((len(division) // width * self._count, width, places), self._none)  # (S, W, places)
        for rank, share in enumerate(division):
            for number, bin_ in enumerate(share):
                self._held[rank // width * self._count + number, rank % width, : len(bin_)] = bin_
        self._packed, self._budget, self._rows_of_a_token = packed, budget, rows_of_a_token(units, width)
        self._loads = self._rows[self._held.reshape(len(self._held), -1)].sum(1)  # (S, L, P)
        self._used = self._fed(self._held)  # (S, W)
        self._costs = self._cost(self._loads, self._used)

    def run(self, enough: float) -> None:
        """Search until the rows of the busiest ranks are as few as `enough`, or hardly get fewer."""
        random = np.random.default_rng(0)
        numbers = TRIED * self._loads[0].size  # of a pair
        pairs = max(1, min(len(self._held) // 2, ROUND // numbers))
        before = np.inf
        for number in range(max(CHECKED_EVERY, min(ROUNDS, WORK // (pairs * numbers)))):
            if number % CHECKED_EVERY == 0:
                busiest = float(self._loads.max(2).sum())
                if busiest <= enough or busiest > before * (1 - LEAST):
                    return
                before = busiest
            self._exchange(random, random.permutation(len(self._held))[: 2 * pairs].reshape(2, -1))

    def division(self) -> Division:
        ranks = len(self._held) // self._count * self._held.shape[1]
        division: Division = [[[] for _ in range(self._count)] for _ in range(ranks)]
        for slot, bins in enumerate(self._held.tolist()):
            group, number = divmod(slot, self._count)
            for rank, bin_ in enumerate(bins, group * len(bins)):
                division[rank][number] = sorted(unit for unit in bin_ if unit != self._none)
        for share in division:
            while share and not share[-1]:
                share.pop()
        return division

    def _fed(self, bins: np.ndarray) -> np.ndarray:
        """(..., places) -> (...): tokens of bins, padding included."""
        tokens = self._tokens[bins]
        return tokens.sum(-1) if self._packed else tokens.max(-1) * (bins != self._none).sum(-1)

    def _cost(self, loads: np.ndarray, used: np.ndarray) -> np.ndarray:
        """(..., L, P), (..., W) -> (...): rows of the busiest rank, and those that the tokens of the fullest bin cost.

        A part of the norm of all ranks is added: several may be the busiest, and an exchange relieves one of them.
        """
        rows = loads.max(-1) + EVEN * np.sqrt(np.einsum("...p,...p", loads, loads))
        return rows.sum(-1) + self._rows_of_a_token * used.max(-1)

    def _exchange(self, random: np.random.Generator, pairs: np.ndarray) -> None:
        """Make the best of some random exchanges between the slots of each pair, (2, n), where it lowers the cost."""
        _, width, places = self._held.shape
        shape = (*pairs.shape, TRIED)
        slot, rank, place = pairs[..., None], random.integers(width, size=shape), random.integers(places, size=shape)
        unit, bins = self._held[slot, rank, place], self._held[slot, rank]
        was_empty = (bins == self._none).all(-1)
        np.put_along_axis(bins, place[..., None], unit[::-1, ..., None], -1)
        fed = self._fed(bins)
        used = np.repeat(self._used[slot], TRIED, 2)
        np.put_along_axis(used, rank[..., None], fed[..., None], -1)
        moved = self._rows[unit[1]] - self._rows[unit[0]]
        loads = self._loads[slot] + np.stack([moved, -moved])
        costs = self._cost(loads, used)
        fits = ((fed <= self._budget) & (was_empty | (bins != self._none).any(-1))).all(0)
        saved = np.where(fits, (self._costs[slot] - costs).sum(0), 0)
        best = saved.argmax(1)
        (taken,) = np.nonzero(saved.max(1) > 1e-6 * self._costs[pairs].sum(0))
        chosen, changed = (np.arange(2)[:, None], taken, best[taken]), pairs[:, taken]
        self._held[changed, rank[chosen]] = bins[chosen]
        self._used[changed], self._loads[changed], self._costs[changed] = used[chosen], loads[chosen], costs[chosen]


# ---- over ranks ------------------------------------------------------------------------------------------------------


class ExpertBalance:
    """Divides the sequences of a step by the rollout's routes: each rank counts its own, rank 0 decides for all.

    metrics   of the last step: the busiest expert-parallel rank relative to the mean, as divided, as tokens alone would
              have been, and of the same mix in every micro-batch
    """

    def __init__(self, backend: Backend) -> None:
        assert backend.expert_exchange is not None, "batch.balance was checked with the other settings"
        self._exchange = backend.expert_exchange
        self._backend = backend
        self.metrics: dict[str, float] = {}

    def divide(
        self,
        updates: Sequence[Bins],
        bodies: Mapping[int, Trajectory],
        layers: Sequence[int],
        budget: int,
        *,
        packed: bool,
    ) -> list[Bins]:
        """Return other micro-batches of this rank for each update, in place of those by tokens. All ranks call it.

        The trees that come from other ranks have indices and no prefixes.

        bodies   of the trees of this rank
        layers   that routes were recorded for
        """
        held, rows = self._counted(updates, bodies, layers)
        rows_of_ranks = all_gather(rows.view(np.uint8), control_group()) if world_size() > 1 else [rows]
        held_of_ranks = all_gather_json(held)

        def decide() -> tuple[list[Indices], dict[str, float]]:
            ranks = _read(held_of_ranks, rows_of_ranks, len(layers), self._exchange.ranks)
            return self._decided(ranks, len(updates), budget, packed=packed)

        divided, self.metrics = from_rank_0(decide, "balancing")
        return [[[Tree(indices) for indices in bin_] for bin_ in ranks[self._backend.data_rank]] for ranks in divided]

    def _counted(
        self, updates: Sequence[Bins], bodies: Mapping[int, Trajectory], layers: Sequence[int]
    ) -> tuple[_Held | None, np.ndarray]:
        """Return this rank's units, if it reports them, and their rows for each rank in each of its layers, flat."""
        if not self._exchange.reports:
            return None, np.zeros(0, np.uint32)
        units = [
            (number, bin_, tree)
            for number, bins in enumerate(updates)
            for bin_, trees in enumerate(bins)
            for tree in trees
        ]
        has_routes = [layer for chunk in self._backend.chunk_layers for layer in chunk if layer in layers]
        positions = sorted(layers.index(layer) for layer in has_routes)
        own_layers = [layers[position] for position in positions]
        rows = np.zeros((len(units), len(own_layers), self._exchange.ranks), np.uint32)
        for unit, (_, _, tree) in enumerate(units):
            shared = [prefix.length for prefix in tree.prefixes]
            for index, start in zip(tree.indices, shared, strict=True):
                trace = bodies[index].trace
                if own_layers and set(own_layers) <= set(trace.layers):  # else it has no routes
                    counts = expert_rows(trace, self._exchange.ranks, self._backend.topology.num_experts, start)
                    rows[unit] += counts[trace.layer_indices(own_layers)].astype(np.uint32)
        places = [(number, bin_, tree.cost, tree.indices) for number, bin_, tree in units]
        return (self._backend.data_rank, positions, places), rows.ravel()

    def _decided(
        self, ranks: Sequence[Sequence[_Unit]], num_updates: int, budget: int, *, packed: bool
    ) -> tuple[list[Indices], dict[str, float]]:
        """Return the division of each update, and the metrics."""
        before, after, limit = Loads(0, 0), Loads(0, 0), Loads(0, 0)
        divided: list[Indices] = []
        for number in range(num_updates):
            chosen: list[_Unit] = []
            division: Division = [[] for _ in range(self._backend.data_size)]
            for rank, held in enumerate(ranks):
                for unit in (unit for unit in held if unit.update == number):
                    division[rank] += [[] for _ in range(unit.bin_ + 1 - len(division[rank]))]
                    division[rank][unit.bin_].append(len(chosen))
                    chosen.append(unit)
            divided.append([[[] for _ in share] for share in division])
            if chosen:
                fed = np.array([unit.tokens for unit in chosen], np.int64)
                rows = np.stack([unit.rows for unit in chosen])
                units = Units(fed, spread_evenly(rows, fed, self._backend.topology.top_k))
                width = self._exchange.data_ranks
                balanced = balanced_division(division, units, width, budget, packed=packed)
                divided[-1] = [[[chosen[unit].indices for unit in bin_] for bin_ in share] for share in balanced]
                before += loads_of(division, units, width)
                after += loads_of(balanced, units, width)
                limit += best_possible(units)
        return divided, {LOAD: after.ratio, LOAD_BY_TOKENS: before.ratio, LOAD_LIMIT: limit.ratio}


class _Unit(NamedTuple):
    """A unit as its rank has counted it, and its place by tokens. rows: (L, P) of all layers."""

    update: int
    bin_: int
    tokens: int
    indices: list[int]
    rows: np.ndarray


_Held = tuple[int, list[int], list[tuple[int, int, int, list[int]]]]
"""A data rank, the layers of its pipeline stage by their place in all, and its units without their rows."""


def _read(held: Sequence[_Held | None], rows: Sequence[np.ndarray], num_layers: int, ranks: int) -> list[list[_Unit]]:
    """Return the units of each data rank, with the layers of all pipeline stages."""
    units_of_rank: dict[int, list[_Unit]] = {}
    for of_stage, counted in zip(held, rows, strict=True):
        if of_stage is not None:
            data_rank, positions, places = of_stage
            if data_rank not in units_of_rank:
                units_of_rank[data_rank] = [_Unit(*place, np.zeros((num_layers, ranks))) for place in places]
            of_units = counted.view(np.uint32).reshape(len(places), len(positions), ranks)
            for unit, of_unit in zip(units_of_rank[data_rank], of_units, strict=True):
                unit.rows[positions] = of_unit
    return [units_of_rank.get(rank, []) for rank in range(max(units_of_rank, default=-1) + 1)]
