"""GLM-4.5 and 4.6: partial rotary embeddings, biases in attention, DeepSeek-V3's experts and router."""

from __future__ import annotations

from typing import Any

from moe_replay.megatron.weights.deepseek_v3 import prediction_layers, sigmoid_moe_rules, sigmoid_moe_settings
from moe_replay.megatron.weights.family import (
    Family,
    attention_rules,
    attention_settings,
    decoder_rules,
    decoder_settings,
    fused_expert_rules,
    query_key_norm_rules,
)


def settings(hf: Any) -> dict[str, Any]:
    """Return the settings of a `TransformerConfig` for a `Glm4MoeConfig`."""
    return {
        **decoder_settings(hf, qkv_bias=hf.attention_bias),
        **attention_settings(hf),
        **sigmoid_moe_settings(hf),
        "qk_layernorm": hf.use_qk_norm,
    }


GLM4_MOE = Family(
    rules={**decoder_rules(), **attention_rules(), **query_key_norm_rules(), **sigmoid_moe_rules()},
    fused_rules=fused_expert_rules(),
    settings=settings,
    extra_tensors=prediction_layers,
)
