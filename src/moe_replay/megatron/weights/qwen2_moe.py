"""Qwen2-MoE: biases in attention, and one shared expert with its own gate."""

from __future__ import annotations

from typing import Any

from moe_replay.megatron.weights.family import (
    HF_LAYER,
    LAYER,
    Family,
    attention_rules,
    decoder_rules,
    dense_mlp_rules,
    expert_rules,
    fused_expert_rules,
    mlp_rules,
    softmax_moe_settings,
)
from moe_replay.megatron.weights.tensor_slices import Plain, Rule


def settings(hf: Any) -> dict[str, Any]:
    """Return the settings of a `TransformerConfig` for a `Qwen2MoeConfig`."""
    shared = softmax_moe_settings(
        hf,
        expert_size=hf.moe_intermediate_size,
        normalized=hf.norm_topk_prob,
        qkv_bias=getattr(hf, "qkv_bias", True),  # always there in older releases of Transformers
    )
    return {**shared, **gated_shared_expert_settings(hf)}


def gated_shared_expert_settings(hf: Any) -> dict[str, Any]:
    """Return the settings of a shared expert whose output is weighted by a gate."""
    return {
        "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def gated_shared_expert_rules() -> dict[str, Rule]:
    """Return the rules of a shared expert whose output is weighted by a gate."""
    return {
        **mlp_rules(LAYER + "mlp.shared_experts.", HF_LAYER + "mlp.shared_expert."),
        LAYER + "mlp.shared_experts.gate_weight": Plain(HF_LAYER + "mlp.shared_expert_gate.weight"),
    }


QWEN2_MOE = Family(
    rules={
        **decoder_rules(),
        **attention_rules(),
        **dense_mlp_rules(),
        **expert_rules(),
        **gated_shared_expert_rules(),
    },
    fused_rules=fused_expert_rules(),
    settings=settings,
)
