"""Qwen3-MoE: grouped-query attention with norms of queries and keys for each head, any mix of dense and MoE layers."""

from __future__ import annotations

from typing import Any

from moe_replay.megatron.weights.family import (
    EXPERT,
    HF_LAYER,
    LAYER,
    Family,
    attention_rules,
    attention_settings,
    decoder_rules,
    decoder_settings,
    fused_expert_rules,
    mlp_rules,
    query_key_norm_rules,
    router_rule,
    softmax_router_settings,
)


def settings(hf: Any) -> dict[str, Any]:
    """Qwen3MoeConfig -> settings of a `TransformerConfig`."""
    return {
        **decoder_settings(hf),
        **attention_settings(hf),
        **softmax_router_settings(hf.norm_topk_prob),
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "qk_layernorm": True,
    }


QWEN3_MOE = Family(
    "qwen3_moe",
    rules={
        **decoder_rules(),
        **attention_rules(),
        **query_key_norm_rules(),
        **router_rule(),
        **mlp_rules(LAYER + "mlp.", HF_LAYER + "mlp."),
        **mlp_rules(EXPERT, HF_LAYER + "mlp.experts.{expert}."),
    },
    fused=fused_expert_rules(),
    settings=settings,
)
