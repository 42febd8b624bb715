"""A core attention in plain torch: causal, padded or packed (thd), with zigzag context parallelism.

Megatron-Core's own `DotProductAttention` does not support context parallelism or packed sequences; Transformer Engine's
does, but needs CUDA.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.errors import UnsupportedRouterError


class PlainCoreAttention(nn.Module):
    """Replaces `core_attention` in a layer spec. Exact but slow: computes the scores of all pairs of tokens."""

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
            raise UnsupportedRouterError("the plain core attention has no dropout", remedy="Set attention_dropout=0.0")
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.context_group = _context_group(pg_collection) if config.context_parallel_size > 1 else None

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
        packed = query.dim() == 3
        if packed:
            query, key, value = (part.unsqueeze(1) for part in (query, key, value))
        rank, size = (0, 1) if self.context_group is None else (self.context_group.rank(), self.context_group.size())
        lengths = _segment_lengths(packed_seq_params) if packed else [len(query) * size]
        shards = [_token_positions(lengths, shard, size) for shard in range(size)]
        if self.context_group is not None:
            key, value = self._gathered(key), self._gathered(value)
        repeats = query.shape[2] // key.shape[2]  # grouped queries
        key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))

        mine, everyone = shards[rank], torch.cat(shards)
        hidden = (everyone[:, 0] != mine[:, None, 0]) | (everyone[:, 1] > mine[:, None, 1])
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key).float() * self.scale
        weights = scores.masked_fill(hidden.to(scores.device), float("-inf")).softmax(-1).to(value.dtype)
        output = torch.einsum("bnqk,kbnd->qbnd", weights, value).flatten(2)
        return output.squeeze(1) if packed else output

    def _gathered(self, part: Tensor) -> Tensor:
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        return gather_from_sequence_parallel_region(part, group=self.context_group)


def use_plain_attention(spec: Any) -> Any:
    """Put `PlainCoreAttention` into every layer of a layer or block spec."""
    for layer in getattr(spec, "layer_specs", [spec]):
        layer.submodules.self_attention.submodules.core_attention = PlainCoreAttention
    return spec


def _context_group(pg_collection: Any) -> Any:
    from megatron.core import parallel_state

    group = getattr(pg_collection, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def _segment_lengths(packed_seq_params: Any) -> list[int]:
    """Return the widths of the packed sequences, padding included."""
    padded = packed_seq_params.cu_seqlens_q_padded
    bounds = packed_seq_params.cu_seqlens_q if padded is None else padded
    return (bounds[1:] - bounds[:-1]).tolist()


def _token_positions(lengths: list[int], rank: int, size: int) -> Tensor:
    """Return sequence and position of each token of a rank in Megatron's zigzag order, (tokens, 2)."""
    found = []
    for sequence, length in enumerate(lengths):
        positions = torch.arange(length)
        if size > 1:
            pieces = positions.view(2 * size, -1)
            positions = torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
        found.append(torch.stack([torch.full_like(positions, sequence), positions], dim=1))
    return torch.cat(found)
