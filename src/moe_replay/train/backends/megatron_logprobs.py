"""Log-probs of the sampled tokens from a Megatron-Core model, whose vocabulary tensor-parallel ranks share.

The last stage returns its hidden states in place of logits; the output layer is applied here, slice by slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from moe_replay.replay.adapters.megatron import language_model
from moe_replay.train.backends.base import Scores
from moe_replay.train.backends.head_logprobs import Head, head_logprobs
from moe_replay.train.micro_batch import MicroBatch


@contextmanager
def hidden_states_only(chunk: nn.Module) -> Iterator[None]:
    """Have the forward of this chunk end before its output layer, if it has one: hidden states (W, B, H)."""
    model = language_model(chunk)
    has_head, model.post_process = model.post_process, False
    try:
        yield
    finally:
        model.post_process = has_head


def token_scores(
    hidden: Tensor, chunk: nn.Module, batch: MicroBatch, *, temperature: float, rows: int, entropy: bool = True
) -> Scores:
    """Score hidden states (W, B, H) of the last chunk: log-probs (N,) with gradient; entropy (N,) without, or zeros.

    All N tokens of the micro-batch, also those of other context-parallel ranks: each of these ranks computes the whole
    loss, but its gradient flows to its own tokens only, so that the sum over ranks is the gradient.

    hidden   with sequence parallelism, this rank's share of the columns
    rows     whose logits are held at once
    """
    from megatron.core import parallel_state, tensor_parallel

    model = language_model(chunk)
    if model.config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    targets = hidden.transpose(0, 1).flatten(0, 1)[batch.target_positions]
    head = Head(_output_weight(model), model.output_layer.bias, parallel_state.get_tensor_model_parallel_group())
    local = head_logprobs(
        targets,
        head,
        batch.target_ids,
        temperature=temperature,
        chunk=rows,
        entropy=entropy,
        mask=batch.logit_mask,
    )
    every = torch.zeros_like(batch.loss_weights)
    scores = [every.index_copy(0, batch.target_index, values) for values in local]
    context_group: Any = parallel_state.get_context_parallel_group()
    if context_group.size() > 1:
        scores = [_SumOverRanks.apply(values, context_group) for values in scores]
    return Scores(*scores)


def _output_weight(model: Any) -> Tensor:
    shared = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if shared else model.output_layer.weight


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
