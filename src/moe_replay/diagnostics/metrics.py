"""Agreement of routes: pure functions on tensors."""

from __future__ import annotations

import torch

from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch


def shared_experts(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return (...) float32: the share of the experts of `one` (..., K) that are also in `other` (..., K), in any order.

    An expert that `other` names twice counts once: a buffer full of zeros agrees on expert 0 at most.
    """
    # On a GPU it takes longer to start an operation than to compare; on a CPU the loop is faster and needs less memory.
    found = _found_one_by_one(one, other) if one.device.type == "cpu" else _found_at_once(one, other)
    return found.float().mean(-1)


def _found_one_by_one(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    found = one == other[..., :1]
    for number in range(1, other.shape[-1]):
        found |= one == other[..., number, None]
    return found


def _found_at_once(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one[..., None] == other[..., None, :]).any(-1)


def same_experts(one: RouteBatch, other: RouteBatch) -> torch.Tensor:
    """Return (L, R) bool: whether both batches send the row to the same set of experts, in any order."""
    if one.layers != other.layers or one.experts.shape != other.experts.shape:
        raise AlignmentError(
            "only routes of the same layers and rows can be compared",
            expected=f"layers {list(one.layers)}, shape {tuple(one.experts.shape)}",
            found=f"layers {list(other.layers)}, shape {tuple(other.experts.shape)}",
        )
    return (one.experts.sort(-1).values == other.experts.sort(-1).values).all(-1)


def route_agreement(one: RouteBatch, other: RouteBatch) -> torch.Tensor:
    """Return (L,) float64: the share of rows in each layer that go to the same experts, of those that both cover.

    NaN for a layer in which no row is covered by both.
    """
    covered = one.valid & other.valid
    agreeing = (same_experts(one, other) & covered).sum(1, dtype=torch.float64)
    return agreeing / covered.sum(1, dtype=torch.float64)
