"""Mixtral: every layer is MoE; published checkpoints name router and experts differently."""

from __future__ import annotations

from typing import Any

from moe_replay.megatron.weights.family import (
    EXPERT,
    HF_LAYER,
    Family,
    attention_rules,
    decoder_rules,
    fused_expert_rules,
    mlp_rules,
    router_rule,
    softmax_moe_settings,
)


def settings(hf: Any) -> dict[str, Any]:
    """Return the settings of a `TransformerConfig` for a `MixtralConfig`."""
    return softmax_moe_settings(hf, expert_size=hf.intermediate_size, normalized=True)


MIXTRAL = Family(
    rules={
        **decoder_rules(),
        **attention_rules(),
        **router_rule("block_sparse_moe.gate.weight"),
        **mlp_rules(EXPERT, HF_LAYER + "block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
    },
    fused_rules=fused_expert_rules(),
    settings=settings,
)
