"""Megatron-Core 0.12 to 0.15, whose routers ask nobody: their own `topk` is answered.

The way is that of Transformers routers (`topk.py`), so nothing of Megatron is patched here either.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.site import PortKind
from moe_replay.replay.topk import Answer, TopKPort

FIRST_WITH_TWO_CHOICES = (0, 14)  # since then the router chooses a second time for its load-balancing losses


def legacy_port(version: tuple[int, int], config: Any, aux_loss: Literal["native", "replayed"]) -> PortKind:
    """How the routers of an old version are driven."""
    if aux_loss == "replayed":
        return ReplayedAuxLossLegacyPort
    if version < FIRST_WITH_TWO_CHOICES and _has_aux_loss(config):
        raise UnsupportedRouterError(
            f"the load-balancing loss of Megatron-Core {version[0]}.{version[1]} counts the experts that were taken",
            expected="aux_loss='replayed'",
            found="aux_loss='native', the default",
            remedy="Say attach(model, aux_loss='replayed'), or set moe_aux_loss_coeff=0",
        )
    return LegacyPort


def _has_aux_loss(config: Any) -> bool:
    return config.moe_router_load_balancing_type != "none" and bool(config.moe_aux_loss_coeff)


class ReplayedAnswer(Answer):
    """Every `topk` over the experts is answered: for the dispatch, and for the load-balancing losses."""

    def topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The first is the choice, and every later one has its result.

        Scores inside groups have three dimensions: they are a question about groups, never about experts.
        """
        scores = args[0] if args else kwargs["input"]
        taken = self.choice.experts
        if scores.dim() != 2:
            return func(*args, **kwargs)
        if taken is not None and scores.shape[-1] == self.site.num_experts:
            return torch.return_types.topk((scores.gather(-1, taken), taken))
        return super().topk(func, args, kwargs)


class NativeAnswer(ReplayedAnswer):
    """Only the first `topk` over the experts is answered: the dispatch."""

    def topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What comes after the choice is the load-balancing losses' own."""
        return func(*args, **kwargs) if self.choice.experts is not None else super().topk(func, args, kwargs)


class LegacyPort(TopKPort):
    """Drives an old router; its load-balancing losses count its own choice."""

    answer = NativeAnswer


class ReplayedAuxLossLegacyPort(TopKPort):
    """Drives an old router; its load-balancing losses count the experts taken."""

    answer = ReplayedAnswer
