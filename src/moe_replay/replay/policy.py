"""`ReplayPolicy`: how much of what was recorded a replay takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPolicy:
    """Parts of the recorded routes that a replay uses. Default: the experts, with current gate weights.

    gates    take the recorded gate weights too; the router gets no gradient from what is replayed. Needs routes with
             gates: `record(gates=True)`
    margin   take a recorded expert only where the router prefers another one by at most this much, in the logarithm of
             routing weights (`within_margin`)
    """

    gates: bool = False
    margin: float = math.inf

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise ValueError(f"a margin of at least 0, found {self.margin}")
        if self.gates and self.has_margin:
            raise ValueError("gates are those of the recorded experts: they cannot be replayed within a margin")

    @property
    def has_margin(self) -> bool:
        """Whether the experts taken depend on current scores."""
        return self.margin < math.inf


IDS = ReplayPolicy()


class RoutingWeights(NamedTuple):
    """The experts that a forward took and the logarithms of their routing weights, by decoder layer.

    routed_experts   layer -> (R, K)
    log_weights      layer -> (R, K), float32 or float64
    shift            (R,) of the latest forward that was compared with them
    """

    routed_experts: Mapping[int, Tensor]
    log_weights: Mapping[int, Tensor]
    shift: Tensor | None = None


class WithinMargin(NamedTuple):
    """The experts taken, and where recorded ones have replaced the router's own."""

    routed_experts: Tensor  # (..., K) int64, at the places of the recorded ones
    differs: Tensor  # (..., K) bool: recorded experts that the router would not have taken
    replaced: Tensor  # (..., K) bool: those of them that were taken


def within_margin(scores: Tensor, recorded: Tensor, native: Tensor, margin: float) -> WithinMargin:
    """Return recorded experts where the router's own choice is at most `margin` better, else its own; row by row.

    scores (..., E) are logarithms of routing weights: of the softmax or sigmoid of a router's logits. recorded and
    native are (..., K) int64. Experts in both are taken. The others are paired in the order of their scores, the best
    recorded one with the best of the router's own. Of each pair the recorded expert is taken if its score is at most
    `margin` below.
    """
    same = recorded[..., :, None] == native[..., None, :]
    differs = ~same.any(-1)
    places, own_places = (
        _ranked(scores.gather(-1, recorded), differs),
        _ranked(scores.gather(-1, native), ~same.any(-2)),
    )
    pair, own_pair = recorded.gather(-1, places), native.gather(-1, own_places)
    is_near = scores.gather(-1, own_pair) - scores.gather(-1, pair) <= margin
    is_taken = is_near | ~differs.gather(-1, places)
    routed_experts = torch.empty_like(recorded).scatter_(-1, places, torch.where(is_taken, pair, own_pair))
    return WithinMargin(routed_experts, differs, differs & (routed_experts == recorded))


def _ranked(scores: Tensor, differs: Tensor) -> Tensor:
    """Return the places (..., K) of those that differ, the best score first, and after them of the rest."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order.gather(-1, differs.gather(-1, order).to(torch.uint8).argsort(dim=-1, descending=True, stable=True))
