"""Log-probs of the sampled tokens, from logits whose vocabulary is sharded over tensor-parallel ranks.

The logits are the largest tensor of a pass. They are converted to float32 slice by slice, and the backward recomputes
their softmax from one normalizer a row, so that no second tensor of their size is kept.
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

ROWS_PER_SLICE = 1024


def token_scores(logits: Tensor, batch: MicroBatch, temperature: float) -> Scores:
    """Score logits (B, W, V / tensor parallel) of this rank: log-probs (N,) with gradient, entropy (N,) without.

    All N tokens of the micro-batch, also those of other context-parallel ranks: each of these ranks computes the whole
    loss, but its gradient flows to its own tokens only, so that the sum over ranks is the gradient.
    """
    from megatron.core import parallel_state

    tensor_group: Any = parallel_state.get_tensor_model_parallel_group()
    flat = logits.flatten(0, 1)
    local = _VocabularyParallel.apply(flat, batch.target_positions, batch.target_ids, temperature, tensor_group)
    every = torch.zeros_like(batch.loss_weights)
    logprobs, entropy = (every.index_copy(0, batch.target_index, values) for values in local)
    context_group: Any = parallel_state.get_context_parallel_group()
    if context_group.size() > 1:
        logprobs, entropy = (_SumOverRanks.apply(values, context_group) for values in (logprobs, entropy))
    return Scores(logprobs, entropy)


class _VocabularyParallel(Function):
    """Logits (P, V / ranks), positions (n,), targets (n,) -> log-probs (n,), entropy (n,), in float32."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, positions: Tensor, targets: Tensor, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        local_ids = targets - group.rank() * logits.shape[1]
        logprobs, entropy, normalizer = (logits.new_empty(len(positions), dtype=torch.float32) for _ in range(3))
        for part in _slices(len(positions)):
            rows = logits[positions[part]].float() / temperature
            highest = _all_reduce(rows.amax(-1), dist.ReduceOp.MAX, group)
            rows -= highest[:, None]
            chosen = torch.where(
                _is_local(local_ids[part], rows), rows.gather(-1, _column(local_ids[part], rows))[:, 0], 0.0
            )
            exponentials = rows.exp()
            parts = torch.stack([exponentials.sum(-1), chosen, (exponentials * rows).sum(-1)])
            total, chosen, weighted = _all_reduce(parts, dist.ReduceOp.SUM, group)
            logprobs[part] = chosen - total.log()
            entropy[part] = total.log() - weighted / total
            normalizer[part] = highest + total.log()
        ctx.save_for_backward(logits, positions, local_ids, normalizer)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, _ = gradients  # the entropy has none
        logits, positions, local_ids, normalizer = ctx.saved_tensors
        to_logits = torch.zeros_like(logits)
        for part in _slices(len(positions)):
            rows = (logits[positions[part]].float() / ctx.temperature - normalizer[part, None]).exp_().neg_()
            rows.scatter_add_(-1, _column(local_ids[part], rows), _is_local(local_ids[part], rows)[:, None].float())
            to_logits[positions[part]] = (rows * (gradient[part, None] / ctx.temperature)).to(logits.dtype)
        return to_logits, None, None, None, None


class _SumOverRanks(Function):
    """Sum over ranks; the gradient of each rank flows to its own values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        return _all_reduce(values.clone(), dist.ReduceOp.SUM, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _slices(rows: int) -> Iterator[slice]:
    return (slice(start, start + ROWS_PER_SLICE) for start in range(0, rows, ROWS_PER_SLICE))


def _all_reduce(values: Tensor, how: Any, group: Any) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(values, how, group=group)
    return values


def _is_local(local_ids: Tensor, rows: Tensor) -> Tensor:
    return (local_ids >= 0) & (local_ids < rows.shape[1])


def _column(local_ids: Tensor, rows: Tensor) -> Tensor:
    return local_ids.clamp(0, rows.shape[1] - 1)[:, None]
