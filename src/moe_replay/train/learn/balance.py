"""Micro-batches whose expert-parallel ranks have about as much work each (`batch.balance = "experts"`).

Routes say, before anything is computed, how many rows of each sample go to the experts of each expert-parallel rank.
The ranks of an exchange wait in every layer for the busiest of them, so a micro-batch costs, summed over layers, the
rows of its busiest rank. Samples change places between the micro-batches and data ranks of one update until no exchange
of two makes that less: the samples of an update, and so its gradient, stay the same.

Units are the samples that must stay together: one sample, or the samples that share a prompt (`sharing.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe_replay.distributed.collectives import all_gather, control_group
from moe_replay.distributed.ranks import from_rank_0, world_size
from moe_replay.records import Trajectory
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.backends.base import Backend
from moe_replay.train.learn.sharing import Tree

Division = list[list[list[int]]]
"""[data rank][micro-batch] -> indices of sequences, or of units."""
Bins = list[list[Tree]]
"""Units of each micro-batch of a rank."""

LOAD, LOAD_BY_TOKENS, LOAD_LIMIT = "batch/ep_load", "batch/ep_load_by_tokens", "batch/ep_load_limit"

DOUBLINGS = 4
"""The search lowers a smooth form of the cost, a norm of the power 2^4 over ranks: several may be the busiest."""
CONSIDERED = 32
"""Units of a micro-batch whose exchanges are estimated: those that would cost most less elsewhere."""
TRIED = 24
"""Exchanges of a micro-batch that are computed, the best by their estimate."""
PASSES = 6
"""Times that every micro-batch is visited at most; there are no more exchanges than units."""
WORK = 2**24
"""Exchanges times units at most, so that a step of very many samples does not wait long."""
CLOSE = 1.001
"""Relative to the best that any division can reach: close enough to stop."""


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
    found = np.zeros((-(-len(division) // width) * count, *units.rows.shape[1:]))
    for rank, share in enumerate(division):
        for number, bin_ in enumerate(share):
            found[rank // width * count + number] += units.rows[bin_].sum(0, dtype=np.float64)
    return found


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
    exchanges = -(-len(division) // width) * count
    if exchanges < 2 or units.rows.size == 0:
        return division
    search = _Search(division, units, width, budget, packed=packed)
    search.run()
    found = search.division()
    token = rows_of_a_token(units, width)
    saved = loads_of(division, units, width).busiest - loads_of(found, units, width).busiest
    lost = widest_tokens(found, units, width, packed=packed) - widest_tokens(division, units, width, packed=packed)
    return found if saved > max(lost * token, 0) else division


class _Search:
    """Exchanges of two units between micro-batches, each of which lowers the cost of experts, and that of the pass.

    A bin is a micro-batch of one data rank, a slot the bins that exchange tokens. With packed rows each bin has a unit
    of no tokens too: to exchange that one is to move the other.
    """

    def __init__(self, division: Division, units: Units, width: int, budget: int, *, packed: bool) -> None:
        self._ranks, self._count = len(division), max(map(len, division))
        bins = self._ranks * self._count
        num_units = len(units.tokens)
        empty = bins if packed else 0
        self._real = np.arange(num_units + empty) < num_units
        self._tokens = np.append(units.tokens, np.zeros(empty, np.int64))
        self._rows = units.rows.reshape(num_units, -1)
        self._shape = units.rows.shape[1:]
        self._bin = np.append(np.zeros(num_units, np.int64), np.arange(empty))
        for rank, share in enumerate(division):
            for number, held in enumerate(share):
                self._bin[held] = rank * self._count + number
        self._packed = packed
        numbers = np.arange(bins)
        self._slot_of_bin = numbers // self._count // width * self._count + numbers % self._count
        self._slots = int(self._slot_of_bin.max()) + 1
        self._budget = budget
        self._rows_of_a_token = rows_of_a_token(units, width)
        self._movable = self._tokens <= budget
        self._loads = np.zeros((self._slots, self._rows.shape[1]))
        np.add.at(self._loads, self._slot_of_bin[self._bin[:num_units]], self._rows)
        self._cost = self._costs(self._loads)
        self._enough = CLOSE * best_possible(units).busiest
        self._busiest = np.zeros(self._slots)
        self._estimates = np.zeros((num_units + empty, self._slots), np.float32)
        self._estimate(np.arange(self._slots))

    def run(self) -> None:
        left = min(len(self._rows), WORK // len(self._tokens))
        for _ in range(PASSES):
            before = left
            for slot in np.argsort(-self._cost, kind="stable").tolist():
                while left > 0 and self._busiest.sum() > self._enough and self._exchange_one(slot):
                    left -= 1
            if left == before:
                return

    def division(self) -> Division:
        found: Division = [[[] for _ in range(self._count)] for _ in range(self._ranks)]
        for unit, bin_ in enumerate(self._bin[: len(self._rows)].tolist()):
            found[bin_ // self._count][bin_ % self._count].append(unit)
        for share in found:
            while share and not share[-1]:
                share.pop()
        return found

    # ---- cost -------------------------------------------------------------------------------------------------------

    def _by_layer(self, loads: np.ndarray) -> np.ndarray:
        """(n, L P) -> (n, L, P)."""
        return loads.reshape(len(loads), *self._shape)

    def _costs(self, loads: np.ndarray) -> np.ndarray:
        """(n, L P) -> (n,), smooth."""
        by_layer = self._by_layer(loads)
        busiest = by_layer.max(2)
        norms = _raised(by_layer / np.maximum(busiest, 1e-9)[:, :, None]).sum(2)
        for _ in range(DOUBLINGS):
            norms = np.sqrt(norms)
        return (busiest * norms).sum(1)

    def _estimate(self, slots: np.ndarray) -> None:
        """Compute how much each unit counts in slots: its rows, each as its rank is close to the busiest."""
        loads = self._by_layer(self._loads[slots])
        relative = loads / np.maximum(loads.max(2, keepdims=True), 1e-9)
        raised = _raised(relative)
        total = raised.sum(2, keepdims=True)
        weights = raised / np.maximum(relative, 1e-9) / np.maximum(total, 1e-9) ** (1 - 0.5**DOUBLINGS)
        self._estimates[: len(self._rows), slots] = self._rows @ weights.reshape(len(slots), -1).T.astype(np.float32)
        self._busiest[slots] = loads.max(2).sum(1)

    # ---- exchanges --------------------------------------------------------------------------------------------------

    def _members(self, slot: int) -> np.ndarray:
        return np.flatnonzero((self._slot_of_bin[self._bin] == slot) & self._real & self._movable)

    def _used(self) -> np.ndarray:
        """(bins,) int64: tokens of each bin, padding included."""
        bins = self._ranks * self._count
        if self._packed:
            return np.bincount(self._bin, self._tokens, bins).astype(np.int64)
        longest = np.zeros(bins, np.int64)
        np.maximum.at(longest, self._bin, self._tokens)
        return longest * np.bincount(self._bin, minlength=bins)

    def _rests(self, used: np.ndarray) -> np.ndarray:
        """(units,) int64: tokens of each unit's bin without it; where padded, the longest of the others."""
        if self._packed:
            return used[self._bin] - self._tokens
        order = np.lexsort((self._tokens, self._bin))
        last = np.flatnonzero(np.diff(self._bin[order], append=-1))  # the longest of each bin
        longest = np.zeros(len(used), np.int64)
        longest[self._bin[order[last]]] = self._tokens[order[last]]
        is_longest = np.zeros(len(order), bool)
        is_longest[order[last]] = True
        second = np.zeros(len(used), np.int64)
        np.maximum.at(second, self._bin[~is_longest], self._tokens[~is_longest])
        return np.where(is_longest, second[self._bin], longest[self._bin])

    def _after(self, members: np.ndarray, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(members, units) each: tokens of the bin of a member, and of the other unit, after an exchange of the two."""
        rests = self._rests(used)
        own, other = self._tokens[members][:, None], self._tokens[None]
        if self._packed:
            return rests[members][:, None] + other, rests[None] + own
        units_in = np.bincount(self._bin, minlength=len(used))[self._bin]
        here = np.maximum(rests[members][:, None], other) * units_in[members][:, None]
        return here, np.maximum(rests[None], own) * units_in[None]

    def _lost(self, members: np.ndarray) -> np.ndarray:
        """(members, units): tokens that the fullest bins of two slots gain by an exchange; inf where one does not fit.

        A bin that would have no unit left does not fit.
        """
        used = self._used()
        here, there = self._after(members, used)
        widest, others = self._widest(used)
        slots, bins = self._slot_of_bin[self._bin], self._bin
        gained = np.maximum(others[bins[members]][:, None], here) - widest[slots[members]][:, None]
        gained = gained + np.maximum(others[bins][None], there) - widest[slots][None]
        units_in = np.bincount(bins[: len(self._rows)], minlength=len(used))[bins[members]]
        fits = (here <= self._budget) & (there <= self._budget) & (self._real[None] | (units_in > 1)[:, None])
        return np.where(fits, gained, np.inf)

    def _widest(self, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(slots,) tokens of the fullest bin, and (bins,) those of the fullest of the other bins of its slot."""
        order = np.lexsort((used, self._slot_of_bin))
        last = np.flatnonzero(np.diff(self._slot_of_bin[order], append=-1))
        widest = used[order[last]]
        others = widest[self._slot_of_bin]
        second = np.zeros(self._slots, np.int64)
        rest = np.setdiff1d(order, order[last])
        np.maximum.at(second, self._slot_of_bin[rest], used[rest])
        others[order[last]] = second
        return widest, others

    def _exchange_one(self, slot: int) -> bool:
        """Make the best exchange of a unit of a slot with one of another; return whether any lowers the cost."""
        slots = self._slot_of_bin[self._bin]
        estimates = self._estimates
        members = self._members(slot)
        elsewhere = estimates[members].mean(1) - estimates[members, slot]
        members = members[np.argsort(elsewhere, kind="stable")[:CONSIDERED]]
        change = estimates[None, :, slot] - estimates[members, slot][:, None]
        change += estimates[members][:, slots] - estimates[np.arange(len(slots)), slots][None]
        lost = self._lost(members) * self._rows_of_a_token
        change = np.where(change < 0, change + lost, np.inf)
        change[:, (slots == slot) | ~self._movable] = np.inf
        flat = change.ravel()
        order = np.sort(np.argpartition(flat, TRIED)[:TRIED]) if flat.size > TRIED else np.arange(flat.size)
        order = order[flat[order] < 0]
        if not len(order):
            return False
        ours, theirs = members[order // len(slots)], order % len(slots)
        moved = self._rows_of(theirs) - self._rows_of(ours)
        others = slots[theirs]
        here, there = self._loads[slot] + moved, self._loads[others] - moved
        saved = self._cost[slot] + self._cost[others] - self._costs(here) - self._costs(there)
        saved -= np.maximum(lost.ravel()[order], 0)
        best = int(saved.argmax())
        if saved[best] <= 1e-6 * self._cost[slot]:
            return False
        other = int(others[best])
        self._loads[slot], self._loads[other] = here[best], there[best]
        changed = np.array([slot, other])
        self._cost[changed] = self._costs(self._loads[changed])
        self._bin[[ours[best], theirs[best]]] = self._bin[[theirs[best], ours[best]]]
        self._estimate(changed)
        return True

    def _rows_of(self, units: np.ndarray) -> np.ndarray:
        """(n, L P) float64; those without tokens have none."""
        found = np.zeros((len(units), self._rows.shape[1]))
        real = self._real[units]
        found[real] = self._rows[units[real]]
        return found


def _raised(loads: np.ndarray) -> np.ndarray:
    for _ in range(DOUBLINGS):
        loads = loads * loads
    return loads


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
        own = self._counted(updates, bodies, layers)
        parts = all_gather(own, control_group()) if world_size() > 1 else [own]
        answer = json.loads(
            from_rank_0(lambda: self._decided(parts, len(updates), len(layers), budget, packed=packed), "balancing")
        )
        self.metrics = answer["metrics"]
        return [
            [[Tree(list(indices)) for indices in bin_] for bin_ in ranks[self._backend.data_rank]]
            for ranks in answer["updates"]
        ]

    def _counted(self, updates: Sequence[Bins], bodies: Mapping[int, Trajectory], layers: Sequence[int]) -> np.ndarray:
        """Return the bytes of a part: this rank's units, and their rows for each rank in each of its layers."""
        if not self._exchange.reports:
            return np.zeros(0, np.uint8)
        units = [
            (number, bin_, tree)
            for number, bins in enumerate(updates)
            for bin_, trees in enumerate(bins)
            for tree in trees
        ]
        has_routes = [layer for chunk in self._backend.chunk_layers for layer in chunk if layer in layers]
        positions = sorted(layers.index(layer) for layer in has_routes)
        own = [layers[position] for position in positions]
        rows = np.zeros((len(units), len(own), self._exchange.ranks), np.uint32)
        for unit, (_, _, tree) in enumerate(units):
            shared = [prefix.length for prefix in tree.prefixes]
            for index, start in zip(tree.indices, shared, strict=True):
                trace = bodies[index].trace
                if own and set(own) <= set(trace.layers):  # else it has no routes
                    counts = expert_rows(trace, self._exchange.ranks, self._backend.topology.num_experts, start)
                    rows[unit] += counts[trace.layer_indices(own)].astype(np.uint32)
        head = [self._backend.data_rank, len(positions), len(units), *positions]
        for number, bin_, tree in units:
            head += [number, bin_, tree.cost, len(tree.indices), *tree.indices]
        sized = np.array([len(head), *head], np.int64)
        return np.concatenate([sized.view(np.uint8), rows.reshape(-1).view(np.uint8)])

    def _decided(
        self, parts: Sequence[np.ndarray], num_updates: int, num_layers: int, budget: int, *, packed: bool
    ) -> str:
        """Return the trees of each micro-batch of each data rank for each update, and the metrics, as JSON."""
        ranks = _read_parts(parts, num_layers, self._exchange.ranks)
        before, after, limit = Loads(0, 0), Loads(0, 0), Loads(0, 0)
        answer = []
        for number in range(num_updates):
            trees: list[list[int]] = []
            tokens: list[int] = []
            rows: list[np.ndarray] = []
            division: Division = [[] for _ in range(self._backend.data_size)]
            for rank, held in enumerate(ranks):
                for unit in (unit for unit in held if unit.update == number):
                    division[rank] += [[] for _ in range(unit.bin_ + 1 - len(division[rank]))]
                    division[rank][unit.bin_].append(len(trees))
                    trees.append(unit.indices)
                    tokens.append(unit.tokens)
                    rows.append(unit.rows)
            answer.append([[[] for _ in share] for share in division])
            if trees:
                fed = np.array(tokens, np.int64)
                units = Units(fed, spread_evenly(np.stack(rows), fed, self._backend.topology.top_k))
                width = self._exchange.data_ranks
                found = balanced_division(division, units, width, budget, packed=packed)
                answer[-1] = [[[trees[unit] for unit in bin_] for bin_ in share] for share in found]
                before += loads_of(division, units, width)
                after += loads_of(found, units, width)
                limit += best_possible(units)
        metrics = {LOAD: after.ratio, LOAD_BY_TOKENS: before.ratio, LOAD_LIMIT: limit.ratio}
        return json.dumps({"updates": answer, "metrics": metrics})


class _Unit(NamedTuple):
    """A unit as its rank has counted it, and its place by tokens. rows: (L, P) of all layers."""

    update: int
    bin_: int
    tokens: int
    indices: list[int]
    rows: np.ndarray


def _read_parts(parts: Sequence[np.ndarray], num_layers: int, ranks: int) -> list[list[_Unit]]:
    """Return the units of each data rank, with the layers of all pipeline stages."""
    found: dict[int, list[_Unit]] = {}
    for part in filter(len, parts):
        size = int(part[:8].view(np.int64)[0])
        head = part[8 : 8 * (size + 1)].view(np.int64).tolist()
        data_rank, num_own, num_units = head[:3]
        positions, at = head[3 : 3 + num_own], 3 + num_own
        rows = part[8 * (size + 1) :].copy().view(np.uint32).reshape(num_units, num_own, ranks)
        is_first = data_rank not in found
        units = found.setdefault(data_rank, [])
        for unit in range(num_units):
            update, bin_, tokens, count = head[at : at + 4]
            if is_first:
                indices = head[at + 4 : at + 4 + count]
                units.append(_Unit(update, bin_, tokens, indices, np.zeros((num_layers, ranks))))
            units[unit].rows[positions] = rows[unit]
            at += 4 + count
    return [found.get(rank, []) for rank in range(max(found, default=-1) + 1)]
