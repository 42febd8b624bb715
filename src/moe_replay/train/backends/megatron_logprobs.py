"""Log-probs of the scored tokens, from logits whose vocabulary is spread over tensor-parallel ranks.

The logits are the largest tensor of a pass. They are read piece by piece, in float32, and the backward computes their
softmax again from one number a row, so that no second tensor of their size is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moe_replay.train.backends.base import Scores
from moe_replay.train.micro_batch import MicroBatch

ROWS_PER_PIECE = 1024


def token_scores(logits: Tensor, batch: MicroBatch, temperature: float) -> Scores:
    """(B, W, V / tensor parallel) on this rank -> log-probs (N,) with gradient and entropy (N,) without.

    All N tokens of the micro-batch, also those of other context-parallel ranks. Each of these ranks then computes the
    whole loss; the gradient goes back to its own tokens only, so that their sum over ranks is the gradient.
    """
    from megatron.core import parallel_state

    tensor_group: Any = parallel_state.get_tensor_model_parallel_group()
    flat = logits.flatten(0, 1)
    mine = _VocabularyParallel.apply(flat, batch.target_positions, batch.target_ids, temperature, tensor_group)
    every = torch.zeros_like(batch.loss_weights)
    logprobs, entropy = (every.index_copy(0, batch.target_index, values) for values in mine)
    context_group: Any = parallel_state.get_context_parallel_group()
    if context_group.size() > 1:
        logprobs, entropy = (_SumOverRanks.apply(values, context_group) for values in (logprobs, entropy))
    return Scores(logprobs, entropy)


class _VocabularyParallel(Function):
    """logits (P, V / ranks), positions (n,), targets (n,) -> log-probs (n,), entropy (n,), in float32."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, positions: Tensor, targets: Tensor, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        own = targets - group.rank() * logits.shape[1]
        logprobs, entropy, normalizer = (logits.new_empty(len(positions), dtype=torch.float32) for _ in range(3))
        for piece in _pieces(len(positions)):
            rows = logits[positions[piece]].float() / temperature
            highest = _reduced(rows.amax(-1), dist.ReduceOp.MAX, group)
            rows -= highest[:, None]
            chosen = torch.where(_is_mine(own[piece], rows), rows.gather(-1, _column(own[piece], rows))[:, 0], 0.0)
            exponentials = rows.exp()
            parts = torch.stack([exponentials.sum(-1), chosen, (exponentials * rows).sum(-1)])
            total, chosen, weighted = _reduced(parts, dist.ReduceOp.SUM, group)
            logprobs[piece] = chosen - total.log()
            entropy[piece] = total.log() - weighted / total
            normalizer[piece] = highest + total.log()
        ctx.save_for_backward(logits, positions, own, normalizer)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, _ = gradients  # none to the entropy
        logits, positions, own, normalizer = ctx.saved_tensors
        to_logits = torch.zeros_like(logits)
        for piece in _pieces(len(positions)):
            rows = (logits[positions[piece]].float() / ctx.temperature - normalizer[piece, None]).exp_().neg_()
            rows.scatter_add_(-1, _column(own[piece], rows), _is_mine(own[piece], rows)[:, None].float())
            to_logits[positions[piece]] = (rows * (gradient[piece, None] / ctx.temperature)).to(logits.dtype)
        return to_logits, None, None, None, None


class _SumOverRanks(Function):
    """The sum, of which each rank's own part has the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        return _reduced(values.clone(), dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _pieces(rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS_PER_PIECE) for start in range(0, rows, ROWS_PER_PIECE))


def _reduced(values: Tensor, how: Any, group: Any) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, how, group=group)
    return values


def _is_mine(own: Tensor, rows: Tensor) -> Tensor:
    return (own >= 0) & (own < rows.shape[1])


def _column(own: Tensor, rows: Tensor) -> Tensor:
    return own.clamp(0, rows.shape[1] - 1)[:, None]
