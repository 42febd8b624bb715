"""Qwen3-MoE: grouped-query attention with per-head query and key norms, any mix of dense and MoE layers."""

from __future__ import annotations

from typing import Any

from moe_replay.megatron.weights.family import (
    Family,
    attention_rules,
    decoder_rules,
    dense_mlp_rules,
    expert_rules,
    fused_expert_rules,
    query_key_norm_rules,
    softmax_moe_settings,
)


def settings(hf: Any) -> dict[str, Any]:
    """Return the settings of a `TransformerConfig` for a `Qwen3MoeConfig`."""
    shared = softmax_moe_settings(hf, expert_size=hf.moe_intermediate_size, normalized=hf.norm_topk_prob)
    return {**shared, "qk_layernorm": True}


QWEN3_MOE = Family(
    rules={
        **decoder_rules(),
        **attention_rules(),
        **query_key_norm_rules(),
        **dense_mlp_rules(),
        **expert_rules(),
    },
    fused_rules=fused_expert_rules(),
    settings=settings,
)
