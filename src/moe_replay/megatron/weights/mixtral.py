"""Mixtral: every layer is MoE; its checkpoints have names of their own for the experts."""

from __future__ import annotations

from typing import Any

from moe_replay.megatron.weights.family import (
    EXPERT,
    HF_LAYER,
    Family,
    attention_rules,
    attention_settings,
    decoder_rules,
    decoder_settings,
    fused_expert_rules,
    mlp_rules,
    router_rule,
    softmax_router_settings,
)


def settings(hf: Any) -> dict[str, Any]:
    """MixtralConfig -> settings of a `TransformerConfig`."""
    return {
        **decoder_settings(hf),
        **attention_settings(hf),
        **softmax_router_settings(normalized=True),
        "moe_ffn_hidden_size": hf.intermediate_size,
    }


MIXTRAL = Family(
    "mixtral",
    rules={
        **decoder_rules(),
        **attention_rules(),
        **router_rule("block_sparse_moe.gate.weight"),
        **mlp_rules(EXPERT, HF_LAYER + "block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
    },
    fused={**router_rule(), **fused_expert_rules()},
    settings=settings,
)
