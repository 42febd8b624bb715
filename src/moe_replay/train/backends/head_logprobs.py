"""Log-probs of sampled tokens from hidden states, through the LM head by slices of rows.

Whole logits would be the largest tensors of a pass: rows x vocabulary, in several copies. Here a slice of rows is
multiplied by the head, reduced to one log-prob and one entropy a row, and dropped; the backward computes it again. The
forward is the same with and without gradients, so that scoring and training give the same log-probs bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from moe_replay.train.logit_mask import LogitMask


class Head(NamedTuple):
    """The part of an LM head on this rank.

    weight   (V / ranks, H); a rank has the rows of the vocabulary that follow those of the rank before
    bias     (V / ranks,), or None
    group    process group that shares the vocabulary; None: this rank has all of it
    """

    weight: Tensor
    bias: Tensor | None = None
    group: Any = None


def head_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: bool = True,
    mask: LogitMask | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs (n,) of targets (n,) with gradient, and entropies (n,) without, from hidden states (n, H).

    chunk     rows whose logits are held at once, in float32
    entropy   compute it; zeros otherwise
    mask      supports of the targets: other logits do not count, in log-probs and entropy
    """
    weight, bias, group = head
    if mask is not None:
        mask.check_vocabulary(len(weight) * (1 if group is None else group.size()))
    return _HeadLogprobs.apply(hidden, weight, bias, targets, group, temperature, chunk, entropy, mask)


class _HeadLogprobs(Function):
    """Hidden states (n, H), weight (V / ranks, H), bias, targets (n,) -> log-probs (n,), entropy (n,), in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        group: Any,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        mask: LogitMask | None,
    ) -> tuple[Tensor, Tensor]:
        first = 0 if group is None else group.rank() * len(weight)
        local_ids = targets - first
        logprobs, entropy, normalizer = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        for part in _slices(len(hidden), chunk):
            rows = _logits(hidden[part], weight, bias, temperature)
            dropped = None if mask is None else mask.dropped(part, first, len(weight))
            if dropped is not None:
                rows.masked_fill_(dropped, -torch.inf)
            highest = _all_reduce(rows.amax(-1), dist.ReduceOp.MAX, group)
            rows -= highest[:, None]
            is_local, column = _column(local_ids[part], rows)
            chosen = torch.where(is_local, rows.gather(-1, column)[:, 0], 0.0)
            exponentials = rows.exp()
            parts = [exponentials.sum(-1), chosen]
            if with_entropy:
                if dropped is not None:
                    rows.masked_fill_(dropped, 0.0)  # of probability zero: not a product with minus infinity
                parts.append(exponentials.mul_(rows).sum(-1))
            del rows, exponentials, dropped
            total, chosen, *weighted = _all_reduce(torch.stack(parts), dist.ReduceOp.SUM, group)
            logprobs[part] = chosen - total.log()
            normalizer[part] = highest + total.log()
            if with_entropy:
                entropy[part] = total.log() - weighted[0] / total
        ctx.save_for_backward(hidden, weight, bias, local_ids, normalizer)
        ctx.temperature, ctx.chunk, ctx.mask, ctx.first = temperature, chunk, mask, first
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0] / ctx.temperature  # the entropy has none
        hidden, weight, bias, local_ids, normalizer = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        # In float32: a sum over many slices would lose digits in half precision.
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for part in _slices(len(hidden), ctx.chunk):
            rows = _logits(hidden[part], weight, bias, ctx.temperature).sub_(normalizer[part, None]).exp_().neg_()
            if ctx.mask is not None:
                rows.masked_fill_(ctx.mask.dropped(part, ctx.first, len(weight)), 0.0)
            is_local, column = _column(local_ids[part], rows)
            rows.scatter_add_(-1, column, is_local[:, None].float())
            to_logits = rows.mul_(gradient[part, None]).to(hidden.dtype)
            del rows
            if to_hidden is not None:
                torch.mm(to_logits, weight, out=to_hidden[part])
            if to_weight is not None:
                to_weight += to_logits.T @ hidden[part]
            if to_bias is not None:
                to_bias += to_logits.sum(0, dtype=torch.float32)
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(rows, V / ranks) in float32, in its own memory."""
    return linear(hidden, weight, bias).float().div_(temperature)


def _slices(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, rows, chunk))


def _all_reduce(values: Tensor, how: Any, group: Any) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, how, group=group)
    return values


def _column(local_ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the target is in this rank's part of the vocabulary (rows,), and its column there (rows, 1)."""
    is_local = (local_ids >= 0) & (local_ids < rows.shape[1])
    return is_local, local_ids.clamp(0, rows.shape[1] - 1)[:, None]
