"""Megatron-Core 0.12 to 0.15, whose routers have no replay object: the result of their `topk` is replaced.

The mechanism is that of Transformers routers (`topk.py`), so nothing of Megatron is patched here either.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.site import RouterHookFactory
from moe_replay.replay.topk import RouterCall, TopKHook

FIRST_WITH_TWO_CHOICES = (0, 14)  # since then the router chooses a second time for its load-balancing losses


def legacy_hook(version: tuple[int, int], config: Any, aux_loss: Literal["native", "replayed"]) -> RouterHookFactory:
    """Return the hook for the routers of an old version."""
    if aux_loss == "replayed":
        return ReplayedAuxLossLegacyHook
    if version < FIRST_WITH_TWO_CHOICES and _has_aux_loss(config):
        raise UnsupportedRouterError(
            f"the load-balancing loss of Megatron-Core {version[0]}.{version[1]} counts the experts that were taken",
            expected="aux_loss='replayed'",
            found="aux_loss='native', the default",
            remedy="Call attach(model, aux_loss='replayed'), or set moe_aux_loss_coeff=0",
        )
    return LegacyHook


def _has_aux_loss(config: Any) -> bool:
    return config.moe_router_load_balancing_type != "none" and bool(config.moe_aux_loss_coeff)


class ReplayedAuxLossCall(RouterCall):
    """Replaces the result of every `topk` over the experts: for the dispatch, and for the load-balancing losses."""

    def topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the choice of the first call for every later one.

        Scores inside groups have three dimensions: that `topk` chooses groups, never experts.
        """
        scores = args[0] if args else kwargs["input"]
        taken = self.choice.experts
        if scores.dim() != 2:
            return func(*args, **kwargs)
        if taken is not None and scores.shape[-1] == self.site.num_experts:
            return torch.return_types.topk((scores.gather(-1, taken), taken))
        return super().topk(func, args, kwargs)


class NativeAuxLossCall(ReplayedAuxLossCall):
    """Replaces the result of the first `topk` over the experts alone: the dispatch."""

    def topk(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Leave every call after the choice to the load-balancing losses."""
        return func(*args, **kwargs) if self.choice.experts is not None else super().topk(func, args, kwargs)


class LegacyHook(TopKHook):
    """Hook of an old router; its load-balancing losses count its own choice."""

    call_type = NativeAuxLossCall


class ReplayedAuxLossLegacyHook(TopKHook):
    """Hook of an old router; its load-balancing losses count the experts taken."""

    call_type = ReplayedAuxLossCall
