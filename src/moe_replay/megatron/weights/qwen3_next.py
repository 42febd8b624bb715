"""Qwen3-Next: gated delta nets and gated attention in turn, zero-centred norms, a shared expert with a gate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moe_replay.megatron.gated_delta_net import GatedAttentionOrDeltaNet, ZeroCentredNorm
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.family import (
    HF_LAYER,
    LAYER,
    Family,
    attention_rules,
    decoder_rules,
    dense_mlp_rules,
    expert_rules,
    fused_expert_rules,
    query_key_norm_rules,
    softmax_moe_settings,
)
from moe_replay.megatron.weights.qwen2_moe import gated_shared_expert_rules, gated_shared_expert_settings
from moe_replay.megatron.weights.tensor_slices import GatedQkv, Plain, Rule, Sections

# Ours -> Transformers
_DELTA_NET = {
    "in_proj_qkvz.weight": "in_proj_qkvz.weight",
    "in_proj_ba.weight": "in_proj_ba.weight",
    "out_proj.weight": "out_proj.weight",
    "norm_weight": "norm.weight",
    "dt_bias": "dt_bias",
    "A_log": "A_log",
}


def settings(hf: Any) -> dict[str, Any]:
    """Return the settings of a `TransformerConfig` for a `Qwen3NextConfig`."""
    shared = softmax_moe_settings(hf, expert_size=hf.moe_intermediate_size, normalized=hf.norm_topk_prob)
    return {
        **shared,
        **gated_shared_expert_settings(hf),
        "qk_layernorm": True,
        "attention_output_gate": True,
        "linear_attention_freq": [int(kind == "linear_attention") for kind in hf.layer_types],
        "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
        "linear_key_head_dim": hf.linear_key_head_dim,
        "linear_value_head_dim": hf.linear_value_head_dim,
        "linear_num_key_heads": hf.linear_num_key_heads,
        "linear_num_value_heads": hf.linear_num_value_heads,
    }


def with_delta_nets(spec: Any, config: Any) -> Any:
    """Put both kinds of attention and the zero-centred norm into every layer; refuse layouts that they do not have."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    _check(config)
    for layer in spec.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCentredNorm
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = ZeroCentredNorm
        parts.self_attention = ModuleSpec(GatedAttentionOrDeltaNet, attention.params, attention.submodules)
    spec.layer_norm = ZeroCentredNorm
    return spec


def _check(config: Any) -> None:
    shards = config.tensor_model_parallel_size
    if config.context_parallel_size > 1:
        raise WeightMapError(
            "a gated delta net needs all tokens of a sequence on one rank, here and in Megatron-Core 0.16.1",
            expected="context_parallel_size 1",
            found=config.context_parallel_size,
        )
    if config.linear_num_key_heads % shards or config.num_query_groups % shards:
        raise WeightMapError(
            "the heads cannot be sharded; gated attention of Megatron-Core 0.16.1 needs a key-value head on every rank",
            expected=f"linear_num_key_heads and num_key_value_heads divisible by tensor_model_parallel_size {shards}",
            found=f"{config.linear_num_key_heads} and {config.num_query_groups}",
        )


def delta_net_rules() -> dict[str, Rule]:
    """Return the rules of the linear attention."""
    here, there = LAYER + "self_attention.", HF_LAYER + "linear_attn."
    rules: dict[str, Rule] = {here + ours: Plain(there + name) for ours, name in _DELTA_NET.items()}
    return {**rules, here + "conv_weight": Sections(there + "conv1d.weight", _convolved)}


def _convolved(config: Any) -> tuple[int, ...]:
    """Return the channels of queries, keys and values."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def prediction_layers(config: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return the pattern of the multi-token prediction layers."""
    return re.compile(r"mtp\.")


_INSIDE = HF_LAYER + "self_attn."
QWEN3_NEXT = Family(
    rules={
        **decoder_rules(),
        **attention_rules(),
        LAYER + "self_attention.linear_qkv.weight": GatedQkv(
            _INSIDE + "q_proj.weight", _INSIDE + "k_proj.weight", _INSIDE + "v_proj.weight"
        ),
        **query_key_norm_rules(),
        **delta_net_rules(),
        **dense_mlp_rules(),
        **expert_rules(),
        **gated_shared_expert_rules(),
    },
    fused_rules=fused_expert_rules(),
    settings=settings,
    adapt_spec=with_delta_nets,
    extra_tensors=prediction_layers,
    local_layers=True,
)
