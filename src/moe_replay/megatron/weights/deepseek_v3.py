"""DeepSeek-V3: multi-latent attention, dense first layers, shared experts, sigmoid router with groups and bias."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_replay.megatron.weights.family import (
    HF_LAYER,
    LAYER,
    Family,
    decoder_rules,
    decoder_settings,
    dense_mlp_rules,
    expert_rules,
    fused_expert_rules,
    mlp_rules,
    require,
    rope_parameters,
)
from moe_replay.megatron.weights.tensor_slices import Plain, Rule, WeightMapError

LATENT_NORM_EPS = 1e-6  # Transformers' norms of the latents do not read rms_norm_eps

# Megatron-Core -> Transformers
_ATTENTION = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}


def latent_attention_rules() -> dict[str, Rule]:
    """Projections are stored unchanged, since Megatron-Core also interleaves rotary dimensions."""
    return {
        LAYER + f"self_attention.{here}.weight": Plain(HF_LAYER + f"self_attn.{there}.weight")
        for here, there in _ATTENTION.items()
    }


def settings(hf: Any) -> dict[str, Any]:
    require(hf, "rope_interleave", True)
    return {
        **decoder_settings(hf),
        **_rotary_settings(hf),
        **sigmoid_moe_settings(hf),
        "multi_latent_attention": True,
        "num_query_groups": hf.num_attention_heads,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "kv_channels": hf.v_head_dim,
        "qk_layernorm": True,
    }


def finish_latent_attention(chunk: Any) -> None:
    set_latent_norms(chunk)
    complete_rotary_key_gradient(chunk)


def set_latent_norms(chunk: Any) -> None:
    """Give the norms of the latents the epsilon that they have in Transformers; Megatron-Core has one for all norms."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    for module in chunk.modules():
        if not isinstance(module, MLASelfAttention) or module.config.layernorm_epsilon == LATENT_NORM_EPS:
            continue
        norms: list[Any] = [getattr(module, "q_layernorm", None), module.kv_layernorm]
        for norm in norms:
            if isinstance(norm, IdentityOp):  # Transformer Engine has it inside of the next projection
                raise WeightMapError(
                    "the norms of the latents have another epsilon, which fused norms cannot be given",
                    expected=f"rms_norm_eps {LATENT_NORM_EPS}, or layers without Transformer Engine",
                    found=module.config.layernorm_epsilon,
                )
            if norm is not None:
                norm.eps = LATENT_NORM_EPS


def complete_rotary_key_gradient(chunk: Any) -> None:
    """Sum the gradient of the rotary key over tensor-parallel ranks (layers without Transformer Engine).

    All heads share that key. Megatron-Core gathers it from a sharded projection without summing gradients, so each rank
    keeps the gradient of its own heads (multi_latent_attention.py:596 of 0.16.1). A sequence shard, the output of an
    unsharded projection, is gathered with a sum of the gradients.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    for module in chunk.modules():
        if isinstance(module, MLASelfAttention) and module.config.sequence_parallel:
            projection = module.linear_kv_down_proj
            if isinstance(projection, ColumnParallelLinear):
                projection.register_forward_hook(_as_sequence_shard)


def _as_sequence_shard(module: Any, args: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Turn (s, b, local width) into (local s, b, width)."""
    from megatron.core.tensor_parallel.mappings import (
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    latent, bias = output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(latent)), bias


def _rotary_settings(hf: Any) -> dict[str, Any]:
    rope = rope_parameters(hf)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        # Megatron-Core applies this factor to the softmax scale even without rotary scaling
        return {"rope_type": "rope", "rotary_base": rope["rope_theta"], "rotary_scaling_factor": 1.0}
    both = bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim"))
    if kind != "yarn" or not both or rope.get("attention_factor") is not None or rope.get("truncate") is False:
        raise WeightMapError(
            "these rotary embeddings are not DeepSeek's",
            expected="rope_type 'default', or 'yarn' with both of mscale and mscale_all_dim or none",
            found=rope,
        )
    return {
        "rope_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def sigmoid_moe_settings(hf: Any) -> dict[str, Any]:
    """DeepSeek's sigmoid router, its experts and shared experts."""
    if not hf.norm_topk_prob or hf.num_experts_per_tok == 1:
        raise WeightMapError(
            "Megatron-Core's sigmoid router always normalizes the gate weights of a token",
            expected="norm_topk_prob True and several experts",
            found=f"norm_topk_prob {hf.norm_topk_prob}, num_experts_per_tok {hf.num_experts_per_tok}",
        )
    limited = hf.n_group and hf.topk_group and hf.topk_group < hf.n_group
    if limited and hf.num_experts_per_tok // hf.topk_group != 2:
        raise WeightMapError(
            "Megatron-Core ranks groups by their best num_experts_per_tok // topk_group experts, DeepSeek by two",
            expected="num_experts_per_tok // topk_group 2",
            found=f"{hf.num_experts_per_tok} // {hf.topk_group}",
        )
    return {
        **sigmoid_router_settings(),
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": hf.n_group if limited else None,
        "moe_router_group_topk": hf.topk_group if limited else None,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts or None,
    }


def sigmoid_router_settings() -> dict[str, Any]:
    """A sigmoid router whose choice, not whose gate weights, depends on a bias that is not trained."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
    }


def prediction_layers(config: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return the pattern of multi-token prediction layers, which follow the decoder layers in a checkpoint."""
    first = config["num_hidden_layers"]
    count = config.get("num_nextn_predict_layers", 0) or 0
    layers = "|".join(str(first + index) for index in range(count))
    return re.compile(rf"model\.layers\.({layers})\.") if layers else None


def sigmoid_moe_rules() -> dict[str, Rule]:
    """Dense first layers, a router with bias, experts and shared experts."""
    return {
        **dense_mlp_rules(),
        **expert_rules(),
        **mlp_rules(LAYER + "mlp.shared_experts.", HF_LAYER + "mlp.shared_experts."),
        LAYER + "mlp.router.expert_bias": Plain(HF_LAYER + "mlp.gate.e_score_correction_bias"),
    }


DEEPSEEK_V3 = Family(
    rules={**decoder_rules(), **latent_attention_rules(), **sigmoid_moe_rules()},
    fused_rules=fused_expert_rules(),
    settings=settings,
    after_build=finish_latent_attention,
    extra_tensors=prediction_layers,
)
