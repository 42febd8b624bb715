"""Gated delta net, the linear attention of Qwen3-Next, and its zero-centred norm, as layers for Megatron-Core.

Megatron-Core 0.16.1 has a `GatedDeltaNet`, but only for layers of Transformer Engine and with flash-linear-attention
installed, and not for packed sequences. This one takes the projections in the layout of Transformers checkpoints,
which is sharded by key heads, and runs on any device: with flash-linear-attention's kernel where it is installed, on a
GPU, otherwise with Megatron-Core's own function in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, silu, softplus

from moe_replay.megatron.core_attention import sequence_bounds
from moe_replay.utils.device import accelerator

_L2_EPSILON = 1e-6


class ZeroCentredNorm(nn.Module):
    """RMS norm that multiplies by 1 + weight, in float32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__()
        self.weight = _parameter(config, hidden_size)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return (_rms(hidden.float(), self.eps) * (1.0 + self.weight.float())).type_as(hidden)


class PlainGatedDeltaNet(nn.Module):
    """Takes the place of `self_attention` in a layer.

    in_proj_qkvz   for each key head: query, key, values and gates of its value heads
    in_proj_ba     for each key head: beta and alpha of its value heads
    conv_weight    (channels, 1, kernel): causal convolution over queries, keys and values
    """

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
        how: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        column = how | {"init_method": config.init_method, "gather_output": False}
        self.in_proj_qkvz = ColumnParallelLinear(config.hidden_size, 2 * keys + 2 * values, **column)
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, 2 * config.linear_num_value_heads, **column)
        row = how | {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True}
        self.out_proj = RowParallelLinear(values, config.hidden_size, **row)
        self.sections = (keys // size, keys // size, values // size)
        self.conv_weight = _parameter(config, sum(self.sections), 1, config.linear_conv_kernel_dim, sharded=True)
        self.dt_bias = _parameter(config, self.key_heads * self.ratio, sharded=True)
        self.A_log = _parameter(config, self.key_heads * self.ratio, sharded=True)
        self.norm_weight = _parameter(config, self.value_width)
        # Each rank has the gradient of its own heads; Megatron-Core sums what is marked so.
        self.norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (s, b, H) from (s, b, H), and no bias; `attention_mask` only masks padding at the end."""
        mixed, _ = self.in_proj_qkvz(hidden)
        scalars, _ = self.in_proj_ba(hidden)
        length, batch, _ = mixed.shape
        widths = [self.key_width, self.key_width, *[self.ratio * self.value_width] * 2]
        by_head = mixed.view(length, batch, self.key_heads, sum(widths)).split(widths, dim=-1)
        query, key, value = (part.flatten(2) for part in by_head[:3])
        gate = by_head[3].reshape(length, batch, -1, self.value_width)
        beta, alpha = (
            part.flatten(2)
            for part in scalars.view(length, batch, self.key_heads, 2 * self.ratio).split(self.ratio, dim=-1)
        )
        decay = -self.A_log.float().exp() * softplus(alpha.float() + self.dt_bias)
        parts = torch.cat([query, key, value], dim=-1), decay, beta.sigmoid()
        if packed_seq_params is None:
            output = self._recurrence(*parts)
        else:
            bounds = sequence_bounds(packed_seq_params)
            lengths = (bounds[1:] - bounds[:-1]).tolist()
            each = zip(*(part.split(lengths) for part in parts), strict=True)
            output = torch.cat([self._recurrence(*one) for one in each])
        normed = self.norm_weight * _rms(output.float(), self.config.layernorm_epsilon).to(hidden.dtype)
        return self.out_proj((normed * silu(gate.float())).to(hidden.dtype).flatten(2))

    def _recurrence(self, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return (s, b, value heads, dim) of whole sequences."""
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
    """Builds the attention of a layer by its number: `linear_attention_freq` of the config lists both kinds."""

    def __new__(cls, config: Any, submodules: Any, layer_number: int, **settings: Any) -> Any:
        """Return a `SelfAttention` or a `PlainGatedDeltaNet`."""
        from megatron.core.transformer.attention import SelfAttention

        if config.linear_attention_freq[layer_number - 1]:
            return PlainGatedDeltaNet(config, layer_number, **settings)
        return SelfAttention(config, submodules, layer_number, **settings)


def _delta_rule(value: Tensor) -> Callable[..., Any]:
    """Return the kernel: (b, s, heads, dim) each, decay and beta (b, s, heads)."""
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


def _parameter(config: Any, *shape: int, sharded: bool = False) -> nn.Parameter:
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    device = "cpu" if config.use_cpu_initialization else accelerator()
    made = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device))
    if sharded:
        set_tensor_model_parallel_attributes(made, is_parallel=True, dim=0, stride=1)
    return made
