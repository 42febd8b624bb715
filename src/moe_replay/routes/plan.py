"""`DispatchPlan`: the order in which experts take the rows of a micro-batch, in all layers, before its forward begins.

Experts compute on rows that are ordered by expert: a sort, a count and an inverse in each layer and each pass. Replayed
routes are known before the first layer runs, so one operation orders the rows of all layers, and the forward and its
recomputation use the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch

MOST_PAIRS = 2**23
"""Pairs that are ordered together: a sort needs some 30 bytes of memory for each."""


class Dispatch(NamedTuple):
    """Order in which grouped GEMMs take the (token, choice) pairs of a layer: by expert, then by token."""

    pair: Tensor  # (T * K,) int32: pair in each row
    token: Tensor  # (T * K,) int32: token in each row
    row: Tensor  # (T, K) int32: row of each pair
    offsets: Tensor  # (E,) int32: the end of each expert's rows


class LayerPlan(NamedTuple):
    """The plan of one layer: the order of rows and, where experts are divided among ranks, how rows travel."""

    order: Dispatch
    exchange: Any = None


def order_rows(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return pair (L, N), row (L, N) and offsets (L, E), int32, for the expert ids (L, N) of N pairs in L layers.

    Ids are below 32,768; those of several layers are below `num_experts`. No device sync.
    """
    layers, pairs = ids.shape
    is_narrow = layers * num_experts < 2**15  # a radix sort takes as many passes as a key has bytes
    dtype = torch.int16 if is_narrow else torch.int32
    first = torch.arange(layers, device=ids.device, dtype=dtype)[:, None] * num_experts
    keys, order = torch.sort((ids.to(dtype) + first).view(-1), stable=True)
    order = order.view(layers, pairs) - torch.arange(layers, device=ids.device)[:, None] * pairs
    row = torch.empty((layers, pairs), dtype=torch.int32, device=ids.device)
    row.scatter_(1, order, torch.arange(pairs, dtype=torch.int32, device=ids.device).expand(layers, -1))
    last = torch.arange(num_experts, device=ids.device, dtype=dtype) + first
    offsets = torch.searchsorted(keys.view(layers, pairs), last, right=True, out_int32=True)
    return order.int(), row, offsets


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class DispatchPlan:
    """The order of rows in L layers."""

    routes: RouteBatch  # that it was made of
    version: int  # of their ids, which counts changes in place
    layers: tuple[int, ...]  # decoder index of each of the L slices
    num_experts: tuple[int, ...]  # of each layer
    pair: Tensor  # (L, R * K) int32, see `Dispatch`
    row: Tensor  # (L, R * K) int32
    offsets: Tensor  # (L, E) int32, E of the layer that has most experts
    # by layer, how rows travel between ranks; empty where they do not
    exchanges: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, routes: RouteBatch, num_experts: Mapping[int, int]) -> DispatchPlan | None:
        """Return the plan of layers with these numbers of experts, on the device of the routes; no device sync.

        None where a row of any layer has no route: where it goes is known only when its router has run.
        """
        if not num_experts or not routes.num_rows or not all(routes.all_valid):
            return None
        layers = tuple(sorted(num_experts))
        most = max(num_experts.values())
        ids = torch.stack([routes.layer(layer)[0].reshape(-1) for layer in layers])
        size = max(1, min(2**15 // (most + 1), MOST_PAIRS // ids.shape[1]))
        parts = [order_rows(part, most) for part in ids.split(size)]
        pair, row, offsets = parts[0] if len(parts) == 1 else (torch.cat(same) for same in zip(*parts, strict=True))
        return cls(
            routes=routes,
            version=version_of(routes.routed_experts),
            layers=layers,
            num_experts=tuple(num_experts[layer] for layer in layers),
            pair=pair,
            row=row,
            offsets=offsets,
        )

    def layer(self, layer: int) -> LayerPlan:
        index = self.layers.index(layer)
        pair, top_k = self.pair[index], self.routes.top_k
        # One division here: a compiled kernel would divide for every element that it gathers.
        token = pair // top_k
        offsets = self.offsets[index, : self.num_experts[index]]
        return LayerPlan(Dispatch(pair, token, self.row[index].view(-1, top_k), offsets), self.exchanges.get(layer))

    def to(self, device: torch.device) -> DispatchPlan:
        return replace(self, pair=self.pair.to(device), row=self.row.to(device), offsets=self.offsets.to(device))

    def check(self, routes: RouteBatch, num_experts: Mapping[int, int]) -> None:
        """Raise unless this plan was made of these routes, as they are, for layers with these numbers of experts."""
        planned = self.routes
        for name, expected, actual in (
            ("layers", tuple(sorted(num_experts)), self.layers),
            ("experts", tuple(num_experts[layer] for layer in sorted(num_experts)), self.num_experts),
            ("rows", routes.num_rows, planned.num_rows),
            ("experts per token", routes.top_k, planned.top_k),
        ):
            if expected != actual:
                raise _not_of_these_routes(f"other {name}", f"{name} {expected}", f"{name} {actual}")
        if planned.routed_experts is not routes.routed_experts:
            raise _not_of_these_routes(
                "another micro-batch", routes.layout or "these routes", planned.layout or "others"
            )
        if self.version != version_of(routes.routed_experts):
            raise _not_of_these_routes("changed since", f"version {self.version}", version_of(routes.routed_experts))
        if not all(routes.all_valid):
            lacking = [layer for layer, whole in zip(routes.layers, routes.all_valid, strict=True) if not whole]
            raise _not_of_these_routes("rows without a route", "none", f"some in layers {lacking}")


def _not_of_these_routes(difference: str, expected: object, found: object) -> AlignmentError:
    return AlignmentError(
        f"the dispatch plan was not made of the routes that are replayed: {difference}",
        expected=expected,
        found=found,
        remedy="Make the plan of the batch that is replayed, after its last change, or leave it out",
    )


def version_of(tensor: Tensor) -> int:
    """Return the number of changes in place of a tensor; of an inference tensor it is not known."""
    return 0 if tensor.is_inference() else tensor._version
