"""Context parallelism for Transformers models on any device: each rank gathers the keys and values of all ranks.

Torch's own ring attention does not run on CPU. This one is slow and plain, which is what a test wants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import moe_replay as mr

GATHERED = "keys_and_values_of_all_ranks"


def use_gathered_attention(model: nn.Module) -> None:
    """Make the model's attention look at the tokens of all ranks. Its mask is then that of `visible`."""
    AttentionInterface.register(GATHERED, gathered_attention)
    model.set_attn_implementation(GATHERED)


def gathered_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **settings: Any
) -> tuple[Tensor, None]:
    """This rank's queries (B, H, W, D) over the keys and values of all ranks, in the order of the ranks."""
    keys, values = _OfAllRanks.apply(key), _OfAllRanks.apply(value)
    return sdpa_attention_forward(module, query, keys, values, attention_mask, **settings)


def visible(mine: mr.TokenLayout, of_all_ranks: list[mr.TokenLayout]) -> Tensor:
    """(B, 1, W, ranks * W) bool: a token sees itself and what stands before it in its own sequence."""
    query, key = mine.fed[:, :, None], np.concatenate([layout.fed for layout in of_all_ranks], axis=1)[:, None]
    same_sequence = np.searchsorted(mine.starts, query, "right") == np.searchsorted(mine.starts, key, "right")
    sees = same_sequence & (key <= query) & (key >= 0)
    return torch.from_numpy(sees | (query < 0))[:, None]  # padding sees everything: nobody looks at it


class _OfAllRanks(torch.autograd.Function):
    """(B, H, W, D) of each rank -> (B, H, ranks * W, D). Backward: what all ranks together want of this rank's part."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]
