"""OLMoE: queries and keys are normed over all heads at once, which Megatron-Core has no layer for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
    query_key_norm_rules,
    require,
    router_rule,
    softmax_router_settings,
)


class NormOverHeads(nn.Module):
    """RMS norm of a projection as a whole, whose heads are spread over the tensor-parallel ranks.

    Its weight is cut like the projection, so `qk_layernorm`, which tells Megatron-Core to sum the gradients of such a
    norm over the ranks, stays off.
    """

    def __init__(self, hidden_size: int, config: Any, eps: float, heads: int) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        size = heads * hidden_size // config.tensor_model_parallel_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.width = heads * hidden_size
        self.eps = eps

    def forward(self, heads: Tensor) -> Tensor:
        """(s, b, heads here, dim), or without b where packed -> the same."""
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        flat = heads.flatten(-2).float()
        here = flat.square().sum(-1, keepdim=True)
        # Summed over the ranks in the forward by the one, its gradients in the backward by the other.
        everywhere = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(here))
        normed = flat * torch.rsqrt(everywhere / self.width + self.eps)
        return (self.weight * normed.to(heads.dtype)).view_as(heads)


def settings(hf: Any) -> dict[str, Any]:
    """OlmoeConfig -> settings of a `TransformerConfig`."""
    require(hf, "clip_qkv", None)
    return {
        **decoder_settings(hf),
        **attention_settings(hf),
        **softmax_router_settings(hf.norm_topk_prob),
        "moe_ffn_hidden_size": hf.intermediate_size,
    }


def adapt(spec: Any, config: Any) -> Any:
    """The layer spec with these norms."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    for layer in spec.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.q_layernorm = ModuleSpec(NormOverHeads, params={"heads": config.num_attention_heads})
        parts.k_layernorm = ModuleSpec(NormOverHeads, params={"heads": config.num_query_groups})
    return spec


OLMOE = Family(
    "olmoe",
    rules={
        **decoder_rules(),
        **attention_rules(),
        **query_key_norm_rules(),
        **router_rule(),
        **mlp_rules(EXPERT, HF_LAYER + "mlp.experts.{expert}."),
    },
    fused=fused_expert_rules(),
    settings=settings,
    adapt=adapt,
)
