"""gpt-oss: attention sinks, sliding windows, biases everywhere, experts with a clamped activation.

Its checkpoints store the experts of a layer in one tensor, input first, with gate and up in alternating columns.
"""

from __future__ import annotations

from typing import Any

from moe_replay.megatron.weights.family import (
    EXPERT,
    HF_LAYER,
    LAYER,
    Family,
    attention_rules,
    decoder_rules,
    decoder_settings,
    require,
    rope_parameters,
    softmax_router_settings,
)
from moe_replay.megatron.weights.tensor_slices import (
    AlternatingGateUp,
    Plain,
    Rule,
    Stacked,
    Transposed,
    WeightMapError,
)

QUICK_GELU_GAIN = 1.702  # the gain of Megatron-Core's quick_gelu
SWIGLU_LIMIT = 7.0  # default of older configs


def settings(hf: Any) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    require(hf, "attention_bias", True)
    require(hf, "swiglu_alpha", QUICK_GELU_GAIN)
    return {
        **decoder_settings(hf, qkv_bias=True),
        **softmax_router_settings(normalized=True),
        **_window_settings(hf),
        **_rotary_settings(hf),
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": hf.head_dim,
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "moe_ffn_hidden_size": hf.intermediate_size,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": getattr(hf, "swiglu_limit", SWIGLU_LIMIT),
        "glu_linear_offset": 1.0,
        "moe_grouped_gemm": True,  # see check_experts
    }


def arguments(hf: Any) -> dict[str, Any]:
    is_yarn = rope_parameters(hf).get("rope_type") == "yarn"
    return {"position_embedding_type": "yarn" if is_yarn else "rope"}


def check_experts(spec: Any, config: Any) -> Any:
    """Return the layer spec unchanged; refuse ungrouped experts."""
    if not config.moe_grouped_gemm:
        raise WeightMapError(
            "ungrouped experts with biases get no gradient in Megatron-Core 0.16.1",
            expected="moe_grouped_gemm True",
            found="False",
        )
    return spec


def _window_settings(hf: Any) -> dict[str, Any]:
    sliding = [int(kind == "sliding_attention") for kind in hf.layer_types]
    if not any(sliding):
        return {}
    return {"window_size": (hf.sliding_window - 1, 0), "window_attn_skip_freq": sliding}


def _rotary_settings(hf: Any) -> dict[str, Any]:
    rope = rope_parameters(hf)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "yarn") or any(rope.get(name) for name in ("attention_factor", "mscale")):
        raise WeightMapError(
            "these rotary embeddings are not gpt-oss's",
            expected="rope_type 'default', or 'yarn' without attention_factor and mscale",
            found=rope,
        )
    if kind == "default":
        return {}
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast") or 32.0,
        "yarn_beta_slow": rope.get("beta_slow") or 1.0,
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }


def rules() -> dict[str, Rule]:
    inside = HF_LAYER + "mlp."
    return {
        LAYER + "self_attention.core_attention.softmax_offset": Plain(HF_LAYER + "self_attn.sinks"),
        LAYER + "mlp.router.weight": Plain(inside + "router.weight"),
        LAYER + "mlp.router.bias": Plain(inside + "router.bias"),
        EXPERT + "linear_fc1.weight": Stacked(Transposed(AlternatingGateUp(inside + "experts.gate_up_proj"))),
        EXPERT + "linear_fc1.bias": Stacked(AlternatingGateUp(inside + "experts.gate_up_proj_bias")),
        EXPERT + "linear_fc2.weight": Stacked(Transposed(Plain(inside + "experts.down_proj"))),
        EXPERT + "linear_fc2.bias": Stacked(Plain(inside + "experts.down_proj_bias")),
    }


GPT_OSS = Family(
    rules={**decoder_rules(), **attention_rules(), **rules()},
    fused_rules={},
    settings=settings,
    arguments=arguments,
    adapt_spec=check_experts,
    local_layers=True,  # Transformer Engine stores the sinks in a different parameter
)
