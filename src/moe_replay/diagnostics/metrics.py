"""Numbers about routes: pure functions on tensors."""

from __future__ import annotations

import torch

from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch


def shared_experts(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """(...) float32: the share of the experts of `one` (..., K) that `other` (..., K) names too, in whatever order.

    An expert that `other` names twice counts once: a buffer full of zeros agrees with nobody on more than expert 0.
    """
    return (one.unsqueeze(-1) == other.unsqueeze(-2)).any(-1).float().mean(-1)


def same_experts(one: RouteBatch, other: RouteBatch) -> torch.Tensor:
    """(L, R) bool: the two batches send the row to the same set of experts, in whatever order."""
    if one.layers != other.layers or one.experts.shape != other.experts.shape:
        raise AlignmentError(
            "only routes of the same layers and rows can be compared",
            expected=f"layers {list(one.layers)}, shape {tuple(one.experts.shape)}",
            found=f"layers {list(other.layers)}, shape {tuple(other.experts.shape)}",
        )
    return (one.experts.sort(-1).values == other.experts.sort(-1).values).all(-1)


def route_agreement(one: RouteBatch, other: RouteBatch) -> torch.Tensor:
    """(L,) float64: for each layer, the share of rows that go to the same experts, of those both batches cover.

    A layer in which no row is covered by both has no agreement: NaN.
    """
    covered = one.valid & other.valid
    agreeing = (same_experts(one, other) & covered).sum(1, dtype=torch.float64)
    return agreeing / covered.sum(1, dtype=torch.float64)
