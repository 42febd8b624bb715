"""`SampledRoutes`: the routes of a row sample, gathered on the device, and the sums of the shift test over its rows.

On a GPU so few rows are compared in less time than it takes to start an operation: what counts is the number of
operations. All indices are made on the host and go over in one transfer; all layers, alternatives and shifts are
compared at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_replay.diagnostics.metrics import shared_experts
from moe_replay.diagnostics.row_sample import NEAR_SHIFTS, RowSample
from moe_replay.diagnostics.sequential import PlaceCounts, count_places
from moe_replay.diagnostics.shift import HERE, SHIFTS, foreign_pairs, loads_of, pair_sums
from moe_replay.routes.batch import RouteBatch
from moe_replay.utils.device import indices_to_device

# In `RowSample.index`: the rows at each token shift, and the next token.
_MOVED = [0 if shift == 0 else 1 + NEAR_SHIFTS.index(-shift) for shift in SHIFTS]
_NEXT = _MOVED[HERE + 1]


class SampledRoutes(NamedTuple):
    """Routes of the rows of a sample (U units of M rows) and of their alternatives, in l layers that were drawn.

    native         (l, 1 + P + C, U, M, K): of own rows, of the alternatives, of controls
    exists         (1 + P + C, U, M) bool: where there is such a row
    known          (l or 1, 1 + P + C, U, M) bool: where it has a native route
    given          (l, S, S, U, M, K): given at each shift of layers and tokens
    given_known    (l, S, S, U, M) bool: where anything is given
    nearby         (s, U, M, K): given to own rows in each layer that is at most two from one of the l
    nearby_known   (s, U, M) bool
    layers         (l,) int64: indices of the l layers in the table
    loads          (l + s,) int64: indices in its loads of the l layers, natively, and of the s layers, given
    same_layer     (l,) int64: of these l + s, what is given to the l layers
    segments       (segments, U) float64: 1 for the segment of each unit, else 0
    """

    native: Tensor
    exists: Tensor
    known: Tensor
    given: Tensor
    given_known: Tensor
    nearby: Tensor
    nearby_known: Tensor
    layers: Tensor
    loads: Tensor
    same_layer: Tensor
    segments: Tensor

    @classmethod
    def gather(cls, native: RouteBatch, given: RouteBatch, sample: RowSample, layers: tuple[int, ...]) -> SampledRoutes:
        """Gather what a sample needs of two batches with the same layers and rows, without synchronizing."""
        slots = np.searchsorted(native.layers, layers)
        around = slots[:, None] + np.array(SHIFTS)  # (l, S)
        inside = (around >= 0) & (around < len(native.layers))
        reach = np.unique(around[inside])
        of_table = np.searchsorted(native.source_layers, native.layers)
        index = sample.index
        rows, drawn, there, near, indices, loads, same_layer, segments = indices_to_device(
            native.experts.device,
            np.concatenate([index, index[_MOVED]]),
            slots[:, None],
            np.where(inside, around, -1)[..., None],
            reach[:, None],
            of_table[slots],
            np.concatenate([2 * of_table[slots], 2 * of_table[reach] + 1]),
            len(slots) + np.searchsorted(reach, slots),
            sample.segments,
        )
        # An index of -1 means none. It reads the last row or layer, which then is not counted.
        exists, moved_exist = (rows >= 0).split([len(index), len(SHIFTS)])
        everywhere, own, moved = rows[: len(index)].flatten(), rows[0].flatten(), rows[len(index) :].flatten()
        known = exists[None]
        if not all(native.all_valid):
            known = native.valid[drawn, everywhere].view(-1, *index.shape) & known
        shape, around_shape, top_k = sample.rows.shape, (*around.shape, *moved_exist.shape), native.top_k
        return cls(
            native=native.experts[drawn, everywhere].view(-1, *index.shape, top_k),
            exists=exists,
            known=known,
            given=given.experts[there, moved].view(*around_shape, top_k),
            given_known=given.valid[there, moved].view(around_shape) & (moved_exist & (there >= 0)[..., None, None]),
            nearby=given.experts[near, own].view(-1, *shape, top_k),
            nearby_known=given.valid[near, own].view(-1, *shape) & exists[0],
            layers=indices,
            loads=loads,
            same_layer=same_layer,
            segments=segments.double(),
        )

    @property
    def covered(self) -> Tensor:
        """(l, U, M) bool: own rows that are given a route."""
        return self.given_known[:, HERE, HERE]

    def counts(self, num_experts: int) -> PlaceCounts:
        """Return what the alternatives have in common with their rows."""
        return count_places(self.native.long(), self.given[:, HERE, HERE].long()[:, None], num_experts)

    def shift_sums(self, counts: PlaceCounts, num_experts: int) -> ShiftSums:
        """Return the sums of the shift test over the rows of the sample."""
        own, top_k = self.native[:, 0], self.native.shape[-1]
        shared = shared_experts(own[:, None, None], self.given).double()
        follows = self.covered & self.exists[_NEXT]
        echoed = (counts.in_own[:, _NEXT] * follows).sum((1, 2), dtype=torch.float64) / top_k
        return ShiftSums(
            pairs=pair_sums(shared, self.given_known & self.covered[:, None, None]),
            loads=loads_of(
                torch.cat([own, self.nearby]).flatten(1, 2),
                torch.cat([self.covered, self.nearby_known]).flatten(1),
                num_experts,
            ),
            echo=torch.stack([echoed, follows.sum((1, 2), dtype=torch.float64)], 1),
        )

    def chance(self, sums: ShiftSums) -> Tensor:
        """Return (l,): what routes of different tokens share, NaN or 1 without any."""
        own, top_k = sums.loads[: len(self.layers)], self.native.shape[-1]
        common, pairs = foreign_pairs(own, sums.loads[self.same_layer], sums.pairs[:, HERE, HERE], top_k)
        return (common / pairs).clamp(0, 1)

    def spread(self, sums: ShiftSums, layers: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return pairs (L, S, S, 5), loads (L, 2, E + 1) and echo (L, 2) of a table of `layers` layers."""
        loads = sums.loads.new_zeros(2 * layers, sums.loads.shape[1]).index_copy_(0, self.loads, sums.loads)
        pairs, echo = (
            part.new_zeros(layers, *part.shape[1:]).index_copy_(0, self.layers, part)
            for part in (sums.pairs, sums.echo)
        )
        return pairs, loads.unflatten(0, (layers, 2)), echo


class ShiftSums(NamedTuple):
    """Sums of `ShiftTable`: pairs (l, S, S, 5), loads (l + s, E + 1), echo (l, 2)."""

    pairs: Tensor
    loads: Tensor
    echo: Tensor
