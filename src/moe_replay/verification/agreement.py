"""Agreement of two sets of routes: overlap of experts, equal sets, agreement by layer."""

from __future__ import annotations

import torch

from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch


def expert_overlap(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return (...) float32: the fraction of the experts of `a` (..., K) that are also in `b` (..., K), in any order.

    An expert that `b` names twice counts once: a buffer full of zeros agrees on expert 0 at most.
    """
    # On a GPU it takes longer to start an operation than to compare; on a CPU the loop is faster and needs less memory.
    is_shared = _shared_by_column(a, b) if a.device.type == "cpu" else _shared_broadcast(a, b)
    return is_shared.float().mean(-1)


def _shared_by_column(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    is_shared = a == b[..., :1]
    for column in range(1, b.shape[-1]):
        is_shared |= a == b[..., column, None]
    return is_shared


def _shared_broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a[..., None] == b[..., None, :]).any(-1)


def same_experts(a: RouteBatch, b: RouteBatch) -> torch.Tensor:
    """Return (L, R) bool: whether both batches send the row to the same set of experts, in any order."""
    if a.layers != b.layers or a.routed_experts.shape != b.routed_experts.shape:
        raise AlignmentError(
            "only routes of the same layers and rows can be compared",
            expected=f"layers {list(a.layers)}, shape {tuple(a.routed_experts.shape)}",
            found=f"layers {list(b.layers)}, shape {tuple(b.routed_experts.shape)}",
        )
    return (a.routed_experts.sort(-1).values == b.routed_experts.sort(-1).values).all(-1)


def route_agreement(a: RouteBatch, b: RouteBatch) -> torch.Tensor:
    """Return (L,) float64: the fraction of rows covered by both that go to the same experts, by layer.

    NaN for a layer in which no row is covered by both.
    """
    covered = a.valid & b.valid
    agreeing = (same_experts(a, b) & covered).sum(1, dtype=torch.float64)
    return agreeing / covered.sum(1, dtype=torch.float64)
