"""Qwen3-Next: alternating gated delta nets and gated attention, zero-centred norms, a shared expert with a gate.

Megatron-Core 0.16.1 has a `GatedDeltaNet`, but only for Transformer Engine's layers with flash-linear-attention
installed, and not for packed sequences. `PlainGatedDeltaNet` takes the projections in the layout of Transformers
checkpoints, which is sharded by key heads, and runs on any device: with flash-linear-attention's kernel on GPUs where
it is installed, otherwise with Megatron-Core's torch implementation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, silu, softplus

from moe_replay.megatron.core_attention import sequence_bounds
from moe_replay.megatron.parameters import new_parameter
from moe_replay.megatron.weights.family import (
    HF_LAYER,
    LAYER,
    Family,
    attention_rules,
    decoder_rules,
    dense_mlp_rules,
    expert_rules,
    fused_expert_rules,
    gated_shared_expert_rules,
    gated_shared_expert_settings,
    query_key_norm_rules,
    softmax_moe_settings,
)
from moe_replay.megatron.weights.tensor_slices import GatedQkv, Plain, Rule, Sections, WeightMapError

_L2_EPSILON = 1e-6


class ZeroCentredNorm(nn.Module):
    """RMS norm that multiplies by 1 + weight, in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.weight = new_parameter(config, hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return (_rms(hidden.float(), self.eps) * (1.0 + self.weight.float())).type_as(hidden)


class PlainGatedDeltaNet(nn.Module):
    """Replaces `self_attention` in a layer.

    in_proj_qkvz   per key head: query, key, values and gates of its value heads
    in_proj_ba     per key head: beta and alpha of its value heads
    conv_weight    (channels, 1, kernel): causal convolution over queries, keys and values
    """

    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module

    def __init__(self, config: Any, layer_number: int, pg_collection: Any = None, **unused: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        self.config = config
        self.ratio = config.linear_num_value_heads // config.linear_num_key_heads
        size = pg_collection.tp.size()
        self.key_heads = config.linear_num_key_heads // size
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        keys = config.linear_num_key_heads * self.key_width
        values = config.linear_num_value_heads * self.value_width
        common: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        column = common | {"init_method": config.init_method, "gather_output": False}
        for name, width in self.input_widths(keys, values, config.linear_num_value_heads).items():
            self.add_module(name, ColumnParallelLinear(config.hidden_size, width, **column))
        row = common | {
            "init_method": config.output_layer_init_method,
            "input_is_parallel": True,
            "skip_bias_add": True,
        }
        self.out_proj = RowParallelLinear(values, config.hidden_size, **row)
        self.sections = (keys // size, keys // size, values // size)
        self.conv_weight = new_parameter(config, sum(self.sections), 1, config.linear_conv_kernel_dim, partition_dim=0)
        self.dt_bias = new_parameter(config, self.key_heads * self.ratio, partition_dim=0)
        self.A_log = new_parameter(config, self.key_heads * self.ratio, partition_dim=0)
        self.norm_weight = new_parameter(config, self.value_width)
        # Each rank has the gradient of its own heads; this mark makes Megatron-Core sum them.
        self.norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (s, b, H) from (s, b, H), and no bias; `attention_mask` only masks padding at the end."""
        mixed, gate, beta, alpha = self.projected(hidden)
        gate = gate.unflatten(-1, (-1, self.value_width))
        decay = -self.A_log.float().exp() * softplus(alpha.float() + self.dt_bias)
        parts = mixed, decay, beta.sigmoid()
        if packed_seq_params is None:
            output = self._recurrence(*parts)
        else:
            bounds = sequence_bounds(packed_seq_params)
            lengths = (bounds[1:] - bounds[:-1]).tolist()
            sequences = zip(*(part.split(lengths) for part in parts), strict=True)
            output = torch.cat([self._recurrence(*sequence) for sequence in sequences])
        normed = self.norm_weight * _rms(output.float(), self.config.layernorm_epsilon).to(hidden.dtype)
        return self.out_proj((normed * silu(gate.float())).to(hidden.dtype).flatten(2))

    @staticmethod
    def input_widths(keys: int, values: int, value_heads: int) -> dict[str, int]:
        """Return the output widths of the projections of the input, by name."""
        return {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * value_heads}

    def projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values, one after the other; gates; beta and alpha of the value heads."""
        mixed, _ = self.in_proj_qkvz(hidden)
        scalars, _ = self.in_proj_ba(hidden)
        length, batch, _ = mixed.shape
        widths = [self.key_width, self.key_width, *[self.ratio * self.value_width] * 2]
        by_head = mixed.view(length, batch, self.key_heads, sum(widths)).split(widths, dim=-1)
        query, key, value, gate = (part.flatten(2) for part in by_head)
        beta, alpha = (
            part.flatten(2)
            for part in scalars.view(length, batch, self.key_heads, 2 * self.ratio).split(self.ratio, dim=-1)
        )
        return torch.cat([query, key, value], dim=-1), gate, beta, alpha

    def _recurrence(self, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return (s, b, value heads, dim); sequences are whole."""
        kernel = self.conv_weight.shape[-1]
        channels = pad(mixed.permute(1, 2, 0), (kernel - 1, 0))
        convolved = silu(conv1d(channels, self.conv_weight, groups=len(self.conv_weight))).transpose(1, 2)
        query, key, value = convolved.split(self.sections, dim=-1)
        query, key = (
            _l2(part.unflatten(-1, (-1, self.key_width))).repeat_interleave(self.ratio, dim=2) for part in (query, key)
        )
        value = value.unflatten(-1, (-1, self.value_width))
        decay, beta = decay.transpose(0, 1).contiguous(), beta.transpose(0, 1).contiguous()
        output, _ = _delta_rule(value)(query, key, value.contiguous(), g=decay, beta=beta)
        return output.transpose(0, 1)


class GatedAttentionOrDeltaNet:
    """Builds the attention of a layer by its index in the config's `linear_attention_freq`."""

    def __new__(
        cls, config: Any, submodules: Any, layer_number: int, delta_net: type[PlainGatedDeltaNet], **settings: Any
    ) -> Any:
        from megatron.core.transformer.attention import SelfAttention

        if config.linear_attention_freq[layer_number - 1]:
            return delta_net(config, layer_number, **settings)
        return SelfAttention(config, submodules, layer_number, **settings)


def _delta_rule(value: Tensor) -> Callable[..., Any]:
    """Return the kernel; takes (b, s, heads, dim), and decay and beta (b, s, heads)."""
    if value.is_cuda and not torch.are_deterministic_algorithms_enabled() and find_spec("fla") is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule


def _rms(hidden: Tensor, eps: float) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def _l2(heads: Tensor) -> Tensor:
    wide = heads.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _L2_EPSILON)).type_as(heads)


# ---- the family ------------------------------------------------------------------------------------------------------

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
    normalized = getattr(hf, "norm_topk_prob", True)
    shared = softmax_moe_settings(hf, expert_size=hf.moe_intermediate_size, normalized=normalized)
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


def with_delta_nets(spec: Any, config: Any, delta_net: type[PlainGatedDeltaNet] = PlainGatedDeltaNet) -> Any:
    """Put both kinds of attention and the zero-centred norm into every layer; refuse layouts they do not support."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    _check(config)
    for layer in spec.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention
        parts.input_layernorm = parts.pre_mlp_layernorm = ZeroCentredNorm
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = ZeroCentredNorm
        params = {**attention.params, "delta_net": delta_net}
        parts.self_attention = ModuleSpec(GatedAttentionOrDeltaNet, params, attention.submodules)
    spec.layer_norm = ZeroCentredNorm
    return spec


def _check(config: Any) -> None:
    shards = config.tensor_model_parallel_size
    if config.context_parallel_size > 1:
        raise WeightMapError(
            "gated delta nets need all tokens of a sequence on one rank, here and in Megatron-Core 0.16.1",
            expected="context_parallel_size 1",
            found=config.context_parallel_size,
        )
    if config.linear_num_key_heads % shards or config.num_query_groups % shards:
        raise WeightMapError(
            "heads cannot be sharded; Megatron-Core 0.16.1's gated attention needs a key-value head on every rank",
            expected=f"linear_num_key_heads and num_key_value_heads divisible by tensor_model_parallel_size {shards}",
            found=f"{config.linear_num_key_heads} and {config.num_query_groups}",
        )


def delta_net_rules() -> dict[str, Rule]:
    prefix, hf_prefix = LAYER + "self_attention.", HF_LAYER + "linear_attn."
    rules: dict[str, Rule] = {prefix + name: Plain(hf_prefix + hf_name) for name, hf_name in _DELTA_NET.items()}
    return {**rules, prefix + "conv_weight": Sections(hf_prefix + "conv1d.weight", delta_net_channels)}


def delta_net_channels(config: Any) -> tuple[int, ...]:
    """Return the numbers of query, key and value channels."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    return keys, keys, config.linear_num_value_heads * config.linear_value_head_dim


def prediction_layers(config: Mapping[str, Any]) -> re.Pattern[str] | None:
    return re.compile(r"mtp\.")


_HF_ATTENTION = HF_LAYER + "self_attn."
SHARED_RULES: dict[str, Rule] = {
    **decoder_rules(),
    **attention_rules(),
    LAYER + "self_attention.linear_qkv.weight": GatedQkv(
        _HF_ATTENTION + "q_proj.weight", _HF_ATTENTION + "k_proj.weight", _HF_ATTENTION + "v_proj.weight"
    ),
    **query_key_norm_rules(),
    **expert_rules(),
    **gated_shared_expert_rules(),
}
QWEN3_NEXT = Family(
    rules={**SHARED_RULES, **delta_net_rules(), **dense_mlp_rules()},
    fused_rules=fused_expert_rules(),
    settings=settings,
    adapt_spec=with_delta_nets,
    extra_tensors=prediction_layers,
    local_layers=True,
)
