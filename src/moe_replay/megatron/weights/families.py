"""Weight families assembled from shared rules: Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, MiniMax-M2, GLM-4.5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.megatron.parameters import new_parameter
from moe_replay.megatron.weights.deepseek_v3 import (
    prediction_layers,
    sigmoid_moe_rules,
    sigmoid_moe_settings,
    sigmoid_router_settings,
)
from moe_replay.megatron.weights.family import (
    EXPERT,
    HF_LAYER,
    LAYER,
    Family,
    attention_rules,
    attention_settings,
    decoder_rules,
    decoder_settings,
    dense_mlp_rules,
    expert_rules,
    fused_expert_rules,
    gated_shared_expert_rules,
    gated_shared_expert_settings,
    mlp_rules,
    query_key_norm_rules,
    require,
    router_rule,
    softmax_moe_settings,
)
from moe_replay.megatron.weights.tensor_slices import Plain

# ---- Qwen2-MoE -------------------------------------------------------------------------------------------------------
# Biases in attention, and one shared expert with a gate.


def qwen2_moe_settings(hf: Any) -> dict[str, Any]:
    shared = softmax_moe_settings(
        hf,
        expert_size=hf.moe_intermediate_size,
        normalized=hf.norm_topk_prob,
        qkv_bias=getattr(hf, "qkv_bias", True),  # older releases of Transformers always have them
    )
    return {**shared, **gated_shared_expert_settings(hf)}


QWEN2_MOE = Family(
    rules={
        **decoder_rules(),
        **attention_rules(),
        **dense_mlp_rules(),
        **expert_rules(),
        **gated_shared_expert_rules(),
    },
    fused_rules=fused_expert_rules(),
    settings=qwen2_moe_settings,
)


# ---- Qwen3-MoE -------------------------------------------------------------------------------------------------------
# Grouped-query attention with per-head query and key norms, any mix of dense and MoE layers.


def qwen3_moe_settings(hf: Any) -> dict[str, Any]:
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
    settings=qwen3_moe_settings,
)


# ---- Mixtral ---------------------------------------------------------------------------------------------------------
# Every layer is MoE; published checkpoints name router and experts differently.


def mixtral_settings(hf: Any) -> dict[str, Any]:
    return softmax_moe_settings(hf, expert_size=hf.intermediate_size, normalized=True)


MIXTRAL_EXPERTS = {
    **router_rule("block_sparse_moe.gate.weight"),
    **mlp_rules(EXPERT, HF_LAYER + "block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
}
MIXTRAL = Family(
    rules={**decoder_rules(), **attention_rules(), **MIXTRAL_EXPERTS},
    fused_rules=fused_expert_rules(),
    settings=mixtral_settings,
)


# ---- OLMoE -----------------------------------------------------------------------------------------------------------
# Query and key norms over all heads together, for which Megatron-Core has no layer.


class NormOverHeads(nn.Module):
    """RMS norm over all heads of a projection, which are sharded over the tensor-parallel ranks.

    Its weight is sharded like the projection, so `qk_layernorm`, with which Megatron-Core sums the gradients of these
    norms over the ranks, stays off.
    """

    def __init__(self, hidden_size: int, config: Any, eps: float, heads: int) -> None:
        super().__init__()
        self.width = heads * hidden_size
        self.weight = new_parameter(config, self.width // config.tensor_model_parallel_size, partition_dim=0)
        nn.init.ones_(self.weight)
        self.eps = eps

    def forward(self, heads: Tensor) -> Tensor:
        """Normalize (s, b, local heads, dim), or (t, local heads, dim) for packed sequences."""
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        flat = heads.flatten(-2).float()
        local = flat.square().sum(-1, keepdim=True)
        # One sums over the ranks in the forward, the other sums gradients in the backward.
        total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(local))
        normed = flat * torch.rsqrt(total / self.width + self.eps)
        return (self.weight * normed.to(heads.dtype)).view_as(heads)


def olmoe_settings(hf: Any) -> dict[str, Any]:
    require(hf, "clip_qkv", None)
    return softmax_moe_settings(hf, expert_size=hf.intermediate_size, normalized=hf.norm_topk_prob)


def with_norms_over_heads(spec: Any, config: Any) -> Any:
    from megatron.core.transformer.spec_utils import ModuleSpec

    for layer in spec.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.q_layernorm = ModuleSpec(NormOverHeads, params={"heads": config.num_attention_heads})
        parts.k_layernorm = ModuleSpec(NormOverHeads, params={"heads": config.num_query_groups})
    return spec


OLMOE = Family(
    rules={**decoder_rules(), **attention_rules(), **query_key_norm_rules(), **expert_rules()},
    fused_rules=fused_expert_rules(),
    settings=olmoe_settings,
    adapt_spec=with_norms_over_heads,
)


# ---- MiniMax-M2 ------------------------------------------------------------------------------------------------------
# OLMoE's norms of queries and keys, partial rotary embeddings, Mixtral's experts, a sigmoid router with a bias.


def minimax_m2_settings(hf: Any) -> dict[str, Any]:
    require(hf, "router_jitter_noise", 0.0)
    return {
        **decoder_settings(hf),
        **attention_settings(hf),
        **sigmoid_router_settings(),
        "moe_ffn_hidden_size": hf.intermediate_size,
    }


_ROUTER_BIAS = LAYER + "mlp.router.expert_bias"
MINIMAX_M2 = Family(
    rules={
        **decoder_rules(),
        **attention_rules(),
        **query_key_norm_rules(),
        **MIXTRAL_EXPERTS,
        _ROUTER_BIAS: Plain(HF_LAYER + "block_sparse_moe.e_score_correction_bias"),
    },
    fused_rules={**fused_expert_rules(), _ROUTER_BIAS: Plain(HF_LAYER + "mlp.e_score_correction_bias")},
    settings=minimax_m2_settings,
    adapt_spec=with_norms_over_heads,
)


# ---- GLM-4.5 and 4.6 -------------------------------------------------------------------------------------------------
# Partial rotary embeddings, biases in attention, DeepSeek-V3's experts and router.


def glm4_moe_settings(hf: Any) -> dict[str, Any]:
    return {
        **decoder_settings(hf, qkv_bias=hf.attention_bias),
        **attention_settings(hf),
        **sigmoid_moe_settings(hf),
        "qk_layernorm": hf.use_qk_norm,
    }


GLM4_MOE = Family(
    rules={**decoder_rules(), **attention_rules(), **query_key_norm_rules(), **sigmoid_moe_rules()},
    fused_rules=fused_expert_rules(),
    settings=glm4_moe_settings,
    extra_tensors=prediction_layers,
)
