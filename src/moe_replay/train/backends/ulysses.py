"""Context parallel by exchanged heads (Ulysses): ranks that share micro-batches, each with some columns of every row.

All of the model works on the columns of its rank except attention: before it, a rank gives away all heads but its own
and gets all columns of those; after it, the columns return to their ranks. Where the ranks do not divide the heads,
heads of zeros make up the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from moe_replay.distributed.collectives import WITHIN, rank_grid


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """The ranks that share a micro-batch with this one; they follow each other.

    group      process group of them
    rank       of this one in the group: its columns come after those of lower ranks
    size       number of them
    """

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, size: int, device: torch.device) -> ContextParallel | None:
        """Divide all ranks into groups of `size`; None if that is 1. All ranks call it."""
        if size == 1:
            return None
        group = rank_grid(size, device, "backend.context_parallel").get_group(WITHIN)
        return cls(group, dist.get_rank() % size, size)

    def heads_of(self, values: Tensor) -> Tensor:
        """Return what this rank's heads have of one value per head: (heads,) -> (heads / size,), rounded up."""
        return pad(values, (0, -len(values) % self.size)).chunk(self.size)[self.rank]

    @torch.compiler.disable
    def gather_columns(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Exchange heads for columns: (B, heads, W, size of a head) -> (B, heads / ranks, W * ranks, size of a head).

        Heads of keys and values are repeated as often as each rank needs one for its queries.
        """
        missing = -query.shape[1] % self.size
        # the least number divides the query heads, since that of the keys and that of the ranks do
        groups = query.shape[1] if missing else lcm(key.shape[1], self.size)
        key, value = (heads.repeat_interleave(groups // heads.shape[1], 1) for heads in (key, value))
        return _Exchange.apply(self, 1, 2, *(pad(heads, (0, 0, 0, 0, 0, missing)) for heads in (query, key, value)))

    @torch.compiler.disable
    def scatter_columns(self, output: Tensor, heads: int) -> Tensor:
        """Undo it after attention: (B, W * ranks, heads / ranks, size of a head) -> (B, W, heads, size of a head)."""
        (columns,) = _Exchange.apply(self, 1, 2, output)
        return columns[:, :, :heads]

    def exchange(self, cut: int, joined: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Send part `i` of dimension `cut` to rank `i`; what arrives is joined along another dimension, rank by rank.

        All tensors travel in one message, as bytes: gloo does not know every dtype.
        """
        parts = [tensor.unflatten(cut, (self.size, -1)).movedim(cut, 0) for tensor in tensors]
        sent = torch.cat([part.flatten(1) for part in parts], 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=self.group)
        pieces = received.split([part[0].numel() for part in parts], 1)
        return tuple(
            piece.view(part.shape).movedim(0, joined).flatten(joined, joined + 1).to(part.dtype)
            for piece, part in zip(pieces, parts, strict=True)
        )


class _Exchange(Function):
    """`ContextParallel.exchange`; gradients return on the way that the values came."""

    @staticmethod
    def forward(ctx: Any, context: ContextParallel, cut: int, joined: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way = context, joined, cut
        return context.exchange(cut, joined, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        context, cut, joined = ctx.way
        return None, None, None, *context.exchange(cut, joined, gradients)


class _SumOverRanks(Function):
    """Sum over ranks; the gradient of each rank flows to its own values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def sum_over_ranks(values: Tensor, group: Any) -> Tensor:
    """Return the sum of the values of a group's ranks, each of which computes the same from it: the whole loss.

    The gradient of a rank flows to its own values only, so that the sum over ranks is the gradient.
    """
    return _SumOverRanks.apply(values, group)
