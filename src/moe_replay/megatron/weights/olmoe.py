"""OLMoE: query and key norms over all heads at once, for which Megatron-Core has no layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.megatron.weights.family import (
    Family,
    attention_rules,
    decoder_rules,
    expert_rules,
    fused_expert_rules,
    query_key_norm_rules,
    require,
    softmax_moe_settings,
)
from moe_replay.utils.device import accelerator


class NormOverHeads(nn.Module):
    """RMS norm over all heads of a projection, which are sharded over the tensor-parallel ranks.

    Its weight is sharded like the projection, so `qk_layernorm`, with which Megatron-Core sums the gradients of these
    norms over the ranks, stays off.
    """

    def __init__(self, hidden_size: int, config: Any, eps: float, heads: int) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        size = heads * hidden_size // config.tensor_model_parallel_size
        device = "cpu" if config.use_cpu_initialization else accelerator()
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self.width = heads * hidden_size
        self.eps = eps

    def forward(self, heads: Tensor) -> Tensor:
        """Normalize (s, b, local heads, dim), or (t, local heads, dim) for packed sequences."""
        from megatron.core.tensor_parallel.mappings import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        flat = heads.flatten(-2).float()
        local = flat.square().sum(-1, keepdim=True)
        # One sums over the ranks in the forward, the other sums the gradients in the backward.
        total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(local))
        normed = flat * torch.rsqrt(total / self.width + self.eps)
        return (self.weight * normed.to(heads.dtype)).view_as(heads)


def settings(hf: Any) -> dict[str, Any]:
    """Return the settings of a `TransformerConfig` for an `OlmoeConfig`."""
    require(hf, "clip_qkv", None)
    return softmax_moe_settings(hf, expert_size=hf.intermediate_size, normalized=hf.norm_topk_prob)


def with_norms_over_heads(spec: Any, config: Any) -> Any:
    """Put `NormOverHeads` into the attention of every layer."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    for layer in spec.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.q_layernorm = ModuleSpec(NormOverHeads, params={"heads": config.num_attention_heads})
        parts.k_layernorm = ModuleSpec(NormOverHeads, params={"heads": config.num_query_groups})
    return spec


OLMOE = Family(
    rules={**decoder_rules(), **attention_rules(), **query_key_norm_rules(), **expert_rules()},
    fused_rules=fused_expert_rules(),
    settings=settings,
    adapt_spec=with_norms_over_heads,
)
