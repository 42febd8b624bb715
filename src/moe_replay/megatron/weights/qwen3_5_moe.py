"""Qwen3.5-MoE: Qwen3-Next with other projections into the gated delta nets, every layer MoE.

The folder of the multimodal model has the language model under another prefix; its other tensors are not trained.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_replay.megatron.weights.family import HF_LAYER, LAYER, Family, fused_expert_rules
from moe_replay.megatron.weights.qwen3_next import (
    SHARED_RULES,
    PlainGatedDeltaNet,
    delta_net_channels,
    delta_net_rules,
    prediction_layers,
    settings,
    with_delta_nets,
)
from moe_replay.megatron.weights.tensor_slices import Plain, Rule, Sections


class SplitGatedDeltaNet(PlainGatedDeltaNet):
    """A gated delta net whose input has four projections.

    in_proj_qkv                all queries, all keys, all values
    in_proj_z                  gates of the values
    in_proj_b, in_proj_a       beta and alpha of each value head
    """

    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module

    @staticmethod
    def input_widths(keys: int, values: int, value_heads: int) -> dict[str, int]:
        heads = {"in_proj_b": value_heads, "in_proj_a": value_heads}
        return {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, **heads}

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed, gate, beta, alpha = (
            project(hidden)[0] for project in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        )
        return mixed, gate, beta, alpha


def _rules() -> dict[str, Rule]:
    prefix, hf_prefix = LAYER + "self_attention.", HF_LAYER + "linear_attn."
    joined = {prefix + f"in_proj_{part}.weight" for part in ("qkvz", "ba")}
    return {
        **SHARED_RULES,
        **{name: rule for name, rule in delta_net_rules().items() if name not in joined},
        **{prefix + f"in_proj_{part}.weight": Plain(hf_prefix + f"in_proj_{part}.weight") for part in "zba"},
        prefix + "in_proj_qkv.weight": Sections(hf_prefix + "in_proj_qkv.weight", delta_net_channels),
    }


def _inside(rule: Any) -> Any:
    """Return a rule with the names of the language model in a multimodal one."""
    changes: dict[str, Any] = {}
    for field in fields(rule):
        value = getattr(rule, field.name)
        if isinstance(value, str):
            changes[field.name] = re.sub(r"^model\.", "model.language_model.", value)
        elif is_dataclass(value):
            changes[field.name] = _inside(value)
    return replace(rule, **changes)


QWEN3_5_MOE_TEXT = Family(
    rules=_rules(),
    fused_rules=fused_expert_rules(),
    settings=settings,
    adapt_spec=partial(with_delta_nets, delta_net=SplitGatedDeltaNet),
    extra_tensors=prediction_layers,
    local_layers=True,
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    rules={name: _inside(rule) for name, rule in QWEN3_5_MOE_TEXT.rules.items()},
    fused_rules={name: _inside(rule) for name, rule in QWEN3_5_MOE_TEXT.fused_rules.items()},
    extra_tensors=lambda config: re.compile(r"mtp\.|model\.visual\."),
)
