"""A core attention in torch: causal, padded or packed (thd), sliding window, sinks, zigzag context parallelism.

Megatron-Core supports packed sequences, context parallelism and multi-latent attention through Transformer Engine only;
its `DotProductAttention` supports none of them and keeps the scores of all token pairs. This module replaces it where
Transformer Engine is missing, on GPUs and CPUs: torch's fused kernels where they apply, explicit scores otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from moe_replay.errors import UnsupportedRouterError
from moe_replay.megatron.parameters import new_parameter
from moe_replay.utils.device import varlen_kernel, varlen_shares_heads

_HALF = (torch.bfloat16, torch.float16)  # dtypes of torch's varlen attention


class PlainCoreAttention(nn.Module):
    """Replaces `core_attention` in a layer spec.

    Settings: `softmax_type` ("learnable": one sink per head, as in gpt-oss), `window_size`, `window_attn_skip_freq`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if (config.attention_dropout if attention_dropout is None else attention_dropout) != 0.0:
            raise UnsupportedRouterError(
                "the plain core attention does not support dropout", remedy="Set attention_dropout=0.0"
            )
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.context_group: Any = _context_group(pg_collection) if config.context_parallel_size > 1 else None
        self.window = _window(config, layer_number)
        self.softmax_offset = _sinks(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return (s, b, heads * dim) from (s, b, heads, dim), or (t, heads * dim) from packed (t, heads, dim).

        Attention is causal within each sequence; `attention_mask` is ignored, since it only masks padding at the end.
        """
        if query.dim() == 3:
            return self._packed(query, key, value, packed_seq_params).flatten(1)
        if self.context_group is not None:
            size = self.context_group.size()
            return self._over_context_ranks(query, key, value, [len(query) * size]).flatten(2)
        return self._causal(query, key, value).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: Any) -> Tensor:
        bounds = sequence_bounds(packed_seq_params)
        varlen = self._varlen_kernel(query, value)
        if varlen is not None:
            longest = packed_seq_params.max_seqlen_q
            window = (-1 if self.window is None else self.window, 0)
            shared = {"enable_gqa": True} if varlen_shares_heads() else {}
            if not shared:
                key, value = _repeated(query, key, value)
            return varlen(
                *(part.contiguous() for part in (query, key, value)),
                *(bounds, bounds, longest, longest),
                scale=self.scale,
                window_size=window,
                **shared,
            )
        lengths = (bounds[1:] - bounds[:-1]).tolist()
        query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        if self.context_group is not None:
            return self._over_context_ranks(query, key, value, lengths).squeeze(1)
        sequences = zip(*(part.split(lengths) for part in (query, key, value)), strict=True)
        return torch.cat([self._causal(*parts) for parts in sequences]).squeeze(1)

    def _varlen_kernel(self, query: Tensor, value: Tensor) -> Callable[..., Any] | None:
        """Return torch's varlen attention where it applies: on GPUs, in half precision, without sinks."""
        is_plain = self.softmax_offset is None and self.context_group is None
        if not (is_plain and query.is_cuda and query.dtype in _HALF and query.shape[-1] == value.shape[-1]):
            return None
        return varlen_kernel()

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend within sequences that are whole on this rank, (s, b, heads, dim)."""
        if self.window is None and self.softmax_offset is None:
            return self._attend(query, key, value, None)
        positions = torch.arange(len(query), device=query.device)
        return self._attend(query, key, value, self._is_visible(positions[:, None] - positions))

    def _over_context_ranks(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        """Attend to the tokens of all ranks, in Megatron's zigzag order, (s, b, heads, dim)."""
        rank, size = self.context_group.rank(), self.context_group.size()
        shards = [_token_positions(lengths, shard, size) for shard in range(size)]
        own_tokens, all_tokens = shards[rank].to(query.device), torch.cat(shards).to(query.device)
        visible = self._is_visible(own_tokens[:, None, 1] - all_tokens[:, 1]) & (
            own_tokens[:, None, 0] == all_tokens[:, 0]
        )
        return self._attend(query, self._gathered(key), self._gathered(value), visible)

    def _is_visible(self, distance: Tensor) -> Tensor:
        """Whether a query sees the key that is `distance` tokens before it."""
        visible = distance >= 0
        return visible if self.window is None else visible & (distance <= self.window)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        """Return (s, b, heads, dim); `visible` (s, keys), None: causal."""
        key, value = _repeated(query, key, value)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if self.softmax_offset is None or visible is None:
            causal = visible is None
            output = scaled_dot_product_attention(query, key, value, visible, is_causal=causal, scale=self.scale)
        else:
            scores = (query @ key.transpose(-2, -1)).float() * self.scale
            scores = scores.masked_fill(~visible, float("-inf"))
            sinks = self.softmax_offset.float()[:, None, None].expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            output = weights.to(value.dtype) @ value
        return output.permute(2, 0, 1, 3)

    def _gathered(self, part: Tensor) -> Tensor:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        return gather_from_sequence_parallel_region(part, group=self.context_group)


def use_plain_attention(spec: Any) -> Any:
    """Put `PlainCoreAttention` into every layer of a layer or block spec that has a core attention."""
    for layer in getattr(spec, "layer_specs", [spec]):
        parts = layer.submodules.self_attention.submodules
        if hasattr(parts, "core_attention"):
            parts.core_attention = PlainCoreAttention
    return spec


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (..., heads, dim) with as many heads as the queries, of which several share one."""
    repeats = query.shape[-2] // key.shape[-2]
    return key.repeat_interleave(repeats, dim=-2), value.repeat_interleave(repeats, dim=-2)


def _context_group(pg_collection: Any) -> Any:
    from megatron.core import parallel_state

    group = getattr(pg_collection, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def _window(config: Any, layer_number: int) -> int | None:
    """Return how many previous tokens a query sees; None: all."""
    size = getattr(config, "window_size", None)
    if size is None:
        return None
    from megatron.core.transformer.utils import is_layer_window_attention

    return size[0] if is_layer_window_attention(size, config.window_attn_skip_freq, layer_number) else None


def _sinks(config: Any) -> nn.Parameter | None:
    """Return the sinks of this rank's heads; the caller's attribute has Megatron-Core's name."""
    kind = getattr(config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    if kind != "learnable":
        raise UnsupportedRouterError(
            "the plain core attention supports learnable sinks or none",
            expected="softmax_type 'learnable'",
            found=repr(kind),
        )
    return new_parameter(config, config.num_attention_heads // config.tensor_model_parallel_size, partition_dim=0)


def sequence_bounds(packed_seq_params: Any) -> Tensor:
    """Return the cumulative lengths of packed sequences, padding included, (sequences + 1,)."""
    padded = packed_seq_params.cu_seqlens_q_padded
    return packed_seq_params.cu_seqlens_q if padded is None else padded


def _token_positions(lengths: list[int], rank: int, size: int) -> Tensor:
    """Return sequence and position of each token of a rank in Megatron's zigzag order, (tokens, 2)."""
    tokens = []
    for sequence, length in enumerate(lengths):
        positions = torch.arange(length)
        chunks = positions.view(2 * size, -1)
        positions = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        tokens.append(torch.stack([torch.full_like(positions, sequence), positions], dim=1))
    return torch.cat(tokens)
