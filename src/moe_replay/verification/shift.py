"""The shift test: how well native and replayed routes agree when one of them is moved by tokens and by layers.

Aligned routes agree most where nothing is moved. What is kept are sums, so that micro-batches and ranks add up and
every rank can judge the same whole (`alignment_verdict.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout
from moe_replay.utils.device import to_device
from moe_replay.verification.agreement import expert_overlap
from moe_replay.verification.sequential import COUNTS_SHAPE, WEALTH_SHAPE

SHIFTS = (-2, -1, 0, 1, 2)
HERE = SHIFTS.index(0)
CELLS = 1 << 22  # ids compared in one operation
_PAIRS, _SHARED, _SQUARED, _MARGIN, _MARGIN_SQUARED = range(5)


@dataclass(frozen=True, eq=False)
class ShiftTable:
    """Sums over (token, layer) pairs that have a replayed route. L layers, S = 5 shifts, E experts; float64.

    A shift of (+1 layer, 0 tokens) compares what a router chooses natively with what the next layer replays:
    where that agrees best, routes are one layer late.

    layers              decoder index of each of the L layers, also of other ranks: their sums are zero until added
    pairs               (L, S layer shifts, S token shifts, 5): pairs compared; their overlap, as a fraction of K,
                        summed and squared; how much more the same token overlaps unmoved, summed and squared
    loads               (L, 2, E + 1): how often each expert is chosen natively, and how often replayed; last, rows
                        counted
    next_token_overlap  (L, 2): overlap of native routes with those of the next token, summed, and the pairs compared
    sequences           (2,): sequences judged by themselves, and those of them that agree no better than chance
    log_wealth          (WEALTH_SHAPE) of the bets against alignment (`sequential.py`)
    unit_counts         (COUNTS_SHAPE): units of the sequential test, and the suspect ones
    """

    layers: tuple[int, ...]
    top_k: int
    pairs: Tensor
    loads: Tensor
    next_token_overlap: Tensor
    sequences: Tensor
    log_wealth: Tensor
    unit_counts: Tensor

    @classmethod
    def empty(cls, layers: tuple[int, ...], top_k: int, num_experts: int, device: torch.device | str) -> ShiftTable:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        count, shifts = len(layers), len(SHIFTS)
        return cls(
            layers,
            top_k,
            pairs=zeros(count, shifts, shifts, 5),
            loads=zeros(count, 2, num_experts + 1),
            next_token_overlap=zeros(count, 2),
            sequences=zeros(2),
            log_wealth=zeros(*WEALTH_SHAPE),
            unit_counts=zeros(*COUNTS_SHAPE),
        )

    # ---- adding up ----------------------------------------------------------------------------------------------

    def vector(self) -> Tensor:
        """Return all sums in one tensor (N,), for one all-reduce."""
        return torch.cat([part.flatten() for part in self._parts().values()])

    def with_vector(self, sums: Tensor) -> ShiftTable:
        """Return the same table with other sums, such as `vector()` added up over all ranks."""
        parts = self._parts()
        cut = sums.split([part.numel() for part in parts.values()])
        return replace(self, **{name: c.view_as(part) for c, (name, part) in zip(cut, parts.items(), strict=True)})

    def __add__(self, other: ShiftTable) -> ShiftTable:
        if (self.layers, self.loads.shape) != (other.layers, other.loads.shape):
            raise AlignmentError("tables of different models cannot be added", expected=self.layers, found=other.layers)
        return self.with_vector(self.vector() + other.vector())

    def _parts(self) -> dict[str, Tensor]:
        names = ("pairs", "loads", "next_token_overlap", "sequences", "log_wealth", "unit_counts")
        return {name: getattr(self, name) for name in names}

    # ---- statistics, in host memory ---------------------------------------------------------------------------

    @cached_property
    def counts(self) -> np.ndarray:
        """(L, S, S): pairs compared."""
        return self._sums[..., _PAIRS]

    @cached_property
    def agreement(self) -> np.ndarray:
        """(L, S, S): the mean overlap; NaN where nothing could be compared."""
        return _ratio(self._sums[..., _SHARED], self.counts)

    @cached_property
    def chance(self) -> np.ndarray:
        """(L, S layer shifts): the agreement of routes that know nothing of each other, from the loads of experts.

        The mean over all pairs of different tokens, NaN without any.
        """
        count = len(self.layers)
        there = np.arange(count)[:, None] + np.array(SHIFTS)
        shifted = self._loads[there.clip(0, count - 1), 1]  # (L, S, E + 1)
        common, pairs = foreign_pairs(self._loads[:, :1], shifted, self._sums[:, :, HERE], self.top_k)
        return np.where((there >= 0) & (there < count), _ratio(common, pairs).clip(0, 1), np.nan)

    @cached_property
    def above_chance(self) -> np.ndarray:
        """(L, S, S): agreement on a scale where 0 is chance and 1 is the same experts for every token."""
        chance = self.chance[..., None]
        return _ratio(self.agreement - chance, 1 - chance)

    @cached_property
    def information(self) -> np.ndarray:
        """(L,): 1 - chance, what a token of the layer can tell; 0 where every token goes to the same experts."""
        return _known(1 - self.chance[:, HERE])

    @cached_property
    def effective_rows(self) -> np.ndarray:
        """(L,): rows compared, fewer where neighbouring tokens have the same routes and so count twice."""
        native, rows = self._loads[:, 0, :-1], self._loads[:, 0, -1]
        expected = _ratio((native**2).sum(1) / self.top_k - rows, rows * (rows - 1))
        next_token_overlap = _ratio(self._next_token_overlap[:, 0], self._next_token_overlap[:, 1])
        repeated = np.clip(_known(_ratio(next_token_overlap - expected, 1 - expected)), 0, 1)
        return self.counts[:, HERE, HERE] * (1 - repeated) / (1 + repeated)

    @cached_property
    def deviation(self) -> np.ndarray:
        """(L,): standard error of the unmoved `above_chance`; infinite without evidence."""
        rows, (count, shared, squared) = self.effective_rows, np.moveaxis(self._sums[:, HERE, HERE, :3], -1, 0)
        # One row that agrees and one that does not are added: few rows that happen to be equal prove little.
        variance = (squared + 1) / (count + 2) - ((shared + 1) / (count + 2)) ** 2
        return _error(variance, rows, self.information)

    @cached_property
    def margin_deviation(self) -> np.ndarray:
        """(L, S, S): standard error of the difference between the unmoved `above_chance` and a moved one."""
        count, margin, squared = (self._sums[..., column] for column in (_PAIRS, _MARGIN, _MARGIN_SQUARED))
        variance = (squared + 2) / (count + 2) - (margin / (count + 2)) ** 2
        share = _known(_ratio(count, self.counts[:, HERE, HERE][:, None, None]))
        information = np.minimum(self.information[:, None], _known(1 - self.chance))
        return _error(variance, share * self.effective_rows[:, None, None], information[..., None])

    @cached_property
    def margin(self) -> np.ndarray:
        """(L, S, S): how far the unmoved `above_chance` is ahead of a moved one, over the tokens that both have."""
        count = self.counts
        moved = self.above_chance
        unmoved_mean = _ratio(self._sums[..., _SHARED] + self._sums[..., _MARGIN], count)
        here = self.chance[:, HERE][:, None, None]
        return _ratio(unmoved_mean - here, 1 - here) - moved

    def pooled(self) -> np.ndarray:
        """Return (S, S): `above_chance` of all layers together, each weighted by what it can tell."""
        weight = np.nan_to_num(self.counts * (1 - self.chance[..., None]))
        return _ratio((np.nan_to_num(self.above_chance) * weight).sum(0), weight.sum(0))

    def __str__(self) -> str:
        lines = ["agreement above chance (1: the same experts, 0: chance)", "layer shift   token shift"]
        lines.append(" " * 12 + "".join(f"{shift:+8d}" for shift in SHIFTS))
        for shift, row in zip(SHIFTS, self.pooled(), strict=True):
            lines.append(f"{shift:+8d}    " + "".join(f"{value:8.3f}" for value in row))
        return "\n".join(lines)

    @cached_property
    def _sums(self) -> np.ndarray:
        return self.pairs.cpu().numpy()

    @cached_property
    def _loads(self) -> np.ndarray:
        return self.loads.cpu().numpy()

    @cached_property
    def _next_token_overlap(self) -> np.ndarray:
        return self.next_token_overlap.cpu().numpy()


def shift_table(
    native: RouteBatch,
    replayed: RouteBatch,
    layout: TokenLayout,
    *,
    rows: np.ndarray | None = None,
) -> ShiftTable:
    """Return the table of these routes: over all rows that hold a token, or `rows` (n,).

    native and replayed have the same layers and rows. Does not synchronize with the device.
    """
    check_comparable(native, replayed, layout)
    picked = np.flatnonzero(layout.rows != PADDING) if rows is None else rows
    near, inside = neighbours(layout, picked)
    device = native.routed_experts.device
    here, moved, exists = (to_device(array, device) for array in (picked, near, inside))
    experts = experts_counted(native, replayed)
    table = ShiftTable.empty(native.source_layers, native.top_k, experts, device)
    index = np.searchsorted(table.layers, native.layers)  # of each slot in the table
    count = len(native.layers)
    for part in chunks(np.arange(count), len(picked) * (len(SHIFTS) * native.top_k) ** 2):
        slots, rank = (to_device(array, device) for array in (part, index[part]))
        chosen = native.routed_experts[slots][:, here]  # (l, n, K)
        counted = replayed.valid[slots][:, here]  # (l, n)
        table.loads[rank, 0] = loads_of(chosen, counted, experts)
        table.loads[rank, 1] = loads_of(replayed.routed_experts[slots][:, here], counted, experts)
        after = HERE + 1
        follows = counted & exists[after] & native.valid[slots][:, moved[after]]
        overlap = expert_overlap(chosen, native.routed_experts[slots][:, moved[after]]).double() * follows
        table.next_token_overlap[rank] = torch.stack([overlap.sum(1), follows.sum(1, dtype=torch.float64)], 1)

        near_slots = to_device(part[:, None] + np.array(SHIFTS), device)  # (l, S)
        inside_model = ((near_slots >= 0) & (near_slots < count))[..., None, None]
        there = near_slots.clamp(0, count - 1)[..., None, None]  # (l, S, 1, 1)
        both = replayed.valid[there, moved] & exists & counted[:, None, None] & inside_model  # (l, S, S, n)
        shared = expert_overlap(chosen[:, None, None], replayed.routed_experts[there, moved]).double()
        table.pairs[rank] = pair_sums(shared, both)
    return table


def pair_sums(shared: Tensor, both: Tensor) -> Tensor:
    """Return `pairs` (l, S, S, 5) of a table: what pairs share, where both have routes, (l, S, S, ...) each."""
    here = shared[:, HERE, HERE, None, None]
    shares = (torch.stack([shared, here - shared]) * both).flatten(4)
    first, second = shares.sum(-1), shares.square().sum(-1)
    pairs = both.flatten(3).sum(-1, dtype=torch.float64)
    return torch.stack([pairs, first[0], second[0], first[1], second[1]], -1)


def foreign_pairs(loads: Any, other_loads: Any, same_token: Any, top_k: int) -> tuple[Any, Any]:
    """Return what pairs of different tokens share, summed, and their number, (...) each; arrays, or tensors.

    loads, other_loads   (..., E + 1) of `ShiftTable.loads`
    same_token           (..., 5) of `ShiftTable.pairs`: the pairs to leave out
    """
    product = loads * other_loads
    common = product[..., :-1].sum(-1) / top_k - same_token[..., _SHARED]
    return common, product[..., -1] - same_token[..., _PAIRS]


def chunks(slots: np.ndarray, cells: int) -> Iterator[np.ndarray]:
    """Split layers so that about `CELLS` ids are compared in one operation; `cells` of each layer."""
    step = max(1, CELLS // max(cells, 1))
    return (slots[first : first + step] for first in range(0, len(slots), step))


def experts_counted(native: RouteBatch, replayed: RouteBatch) -> int:
    """Return the number of experts whose loads are counted.

    Equal on all ranks, since `replay()` refuses ids that the router does not have; else wide enough for any id.
    """
    largest = max(batch.max_expert or 0 for batch in (native, replayed))
    return max(native.num_experts or 0, replayed.num_experts or 0, largest + 1)


def check_comparable(native: RouteBatch, replayed: RouteBatch, layout: TokenLayout) -> None:
    """Raise unless the two hold routes of the same layers and rows, those of the layout."""
    shapes = tuple(native.routed_experts.shape), tuple(replayed.routed_experts.shape)
    if native.layers != replayed.layers or shapes[0] != shapes[1] or layout.num_rows != native.num_rows:
        raise AlignmentError(
            "only routes of the same layers and rows can be compared",
            expected=f"layers {list(native.layers)}, (layers, rows, top_k) = {shapes[0]}, {layout.num_rows} rows",
            found=f"layers {list(replayed.layers)}, {shapes[1]}",
            remedy="Layers are decoder indices, dense ones counted; the layout is that of this rank",
        )


def neighbours(layout: TokenLayout, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (S, n): the row of the token at each shift in its sequence, and whether this rank has it."""
    row_of = np.full(layout.num_tokens, PADDING)
    filled = np.flatnonzero(layout.rows != PADDING)
    row_of[layout.rows[filled]] = filled
    token = layout.rows[rows]
    sequence = np.searchsorted(layout.starts, token, side="right") - 1
    moved = token + np.array(SHIFTS)[:, None]
    inside = (moved >= layout.starts[sequence]) & (moved < layout.starts[sequence + 1])
    near = np.where(inside, row_of[np.clip(moved, 0, max(layout.num_tokens - 1, 0))], PADDING)
    return np.maximum(near, 0), near != PADDING


def loads_of(routed_experts: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """Return (l, E + 1): how often each expert occurs in the rows (l, n, K) that count (l, n); last, these rows."""
    bins = torch.nn.functional.pad(routed_experts.long(), (0, 1), value=num_experts)  # one more choice of every row
    load = torch.zeros(len(routed_experts), num_experts + 1, dtype=torch.float64, device=routed_experts.device)
    return load.scatter_add_(1, bins.flatten(1), counted.double()[..., None].expand(bins.shape).flatten(1))


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return above / below, NaN where `below` is not positive."""
    return np.divide(above, below, out=np.full(np.broadcast(above, below).shape, np.nan), where=below > 0)


def _known(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), 0.0, values)


def _error(variance: np.ndarray, rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the standard error of a mean over `rows`, in units of `scale`; infinite where either is zero."""
    scaled = _ratio(np.sqrt(_ratio(np.maximum(variance, 0), rows)), scale)
    return np.where(np.isnan(scaled), np.inf, scaled)
