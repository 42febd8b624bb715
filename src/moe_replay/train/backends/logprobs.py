"""Log-probs and entropies of sampled tokens, from hidden states through the LM head in slices of rows.

Whole logits would be the largest tensors of a pass: rows x vocabulary, in several copies. Here a slice of rows is
multiplied by the head, reduced to one log-prob and one entropy per row, and dropped; the backward pass recomputes it.
The forward pass is the same with and without gradients, so scoring and training give bit-identical log-probs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from moe_replay.records import MicroBatch
from moe_replay.sampling_mask import LogitMask
from moe_replay.train.backends.attention import forward_arguments
from moe_replay.train.backends.base import Scores
from moe_replay.train.backends.ulysses import ContextParallel, sum_over_ranks


class Head(NamedTuple):
    """The part of an LM head on this rank.

    weight   (V / ranks, H); a rank has the rows of the vocabulary that follow those of the rank before
    bias     (V / ranks,), or None
    group    process group that shares the vocabulary; None: this rank has all of it
    """

    weight: Tensor
    bias: Tensor | None = None
    group: Any = None


def highest_logit(logits: Tensor, temperature: float, dropped: Tensor | None) -> Tensor:
    """Return the highest of each row of logits (n, V), divided by the temperature: (n,)."""
    return _scaled(logits, temperature, dropped).amax(-1)


def row_sums(
    logits: Tensor,
    temperature: float,
    dropped: Tensor | None,
    highest: Tensor,
    targets: Tensor,
    is_local: Tensor,
    with_entropy: bool,
) -> Tensor:
    """Return, for each row of logits (n, V): sum of exponentials, target's logit, and sum for the entropy, (2 or 3, n).

    highest    (n,) is subtracted from each row first
    targets    (n, 1) columns; they count where `is_local` (n,)
    """
    rows = _scaled(logits, temperature, dropped) - highest[:, None]
    chosen = torch.where(is_local, rows.gather(-1, targets)[:, 0], 0.0)
    exponentials = rows.exp()
    sums = [exponentials.sum(-1), chosen]
    if with_entropy:
        if dropped is not None:
            rows = rows.masked_fill(dropped, 0.0)  # of probability zero: not a product with minus infinity
        sums.append((exponentials * rows).sum(-1))
    return torch.stack(sums)


def logits_gradient(
    logits: Tensor,
    temperature: float,
    dropped: Tensor | None,
    normalizer: Tensor,
    targets: Tensor,
    is_local: Tensor,
    gradient: Tensor,
) -> Tensor:
    """Return the gradient of logits (n, V), in their dtype, for a gradient (n,) of the targets' log-probs."""
    rows = (_scaled(logits, temperature, dropped) - normalizer[:, None]).exp().neg()
    rows = rows.scatter_add(-1, targets, is_local[:, None].float())
    return (rows * gradient[:, None]).to(logits.dtype)


def _scaled(logits: Tensor, temperature: float, dropped: Tensor | None) -> Tensor:
    rows = logits.float() / temperature
    return rows if dropped is None else rows.masked_fill(dropped, -torch.inf)


class HeadMath(NamedTuple):
    """Functions of a slice of logits; on a GPU each is compiled to kernels that hold no float32 copy of it."""

    highest: Callable[..., Tensor] = highest_logit
    sums: Callable[..., Tensor] = row_sums
    gradient: Callable[..., Tensor] = logits_gradient


EAGER = HeadMath()


def head_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: bool = True,
    mask: LogitMask | None = None,
    math: HeadMath = EAGER,
) -> tuple[Tensor, Tensor]:
    """Return log-probs (n,) of targets (n,) with gradient, and entropies (n,) without, from hidden states (n, H).

    chunk     rows whose logits are held together
    entropy   compute it; zeros otherwise
    mask      supports of the targets: other logits do not count, in log-probs and entropy
    """
    weight, bias, group = head
    if mask is not None:
        mask.check_vocabulary(len(weight) * (1 if group is None else group.size()))
    return _HeadLogprobs.apply(hidden, weight, bias, targets, group, temperature, chunk, entropy, mask, math)


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
        math: HeadMath,
    ) -> tuple[Tensor, Tensor]:
        first = 0 if group is None else group.rank() * len(weight)
        local_ids = targets - first
        logprobs, entropy, normalizer = (hidden.new_zeros(len(hidden), dtype=torch.float32) for _ in range(3))
        for part in _slices(len(hidden), chunk):
            logits = linear(hidden[part], weight, bias)
            dropped = None if mask is None else mask.dropped(part, first, len(weight))
            highest = _all_reduce(math.highest(logits, temperature, dropped), dist.ReduceOp.MAX, group)
            column, is_local = _column(local_ids[part], len(weight))
            sums = math.sums(logits, temperature, dropped, highest, column, is_local, with_entropy)
            del logits, dropped
            total, chosen, *weighted = _all_reduce(sums, dist.ReduceOp.SUM, group)
            logprobs[part] = chosen - total.log()
            normalizer[part] = highest + total.log()
            if with_entropy:
                entropy[part] = total.log() - weighted[0] / total
        ctx.save_for_backward(hidden, weight, bias, local_ids, normalizer)
        ctx.temperature, ctx.chunk, ctx.mask, ctx.first, ctx.math = temperature, chunk, mask, first, math
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
            logits = linear(hidden[part], weight, bias)
            dropped = None if ctx.mask is None else ctx.mask.dropped(part, ctx.first, len(weight))
            column, is_local = _column(local_ids[part], len(weight))
            to_logits = ctx.math.gradient(
                logits, ctx.temperature, dropped, normalizer[part], column, is_local, gradient[part]
            )
            del logits, dropped
            if to_hidden is not None:
                torch.mm(to_logits, weight, out=to_hidden[part])
            if to_weight is not None:
                _add_product_(to_weight, to_logits.T, hidden[part])
            if to_bias is not None:
                to_bias += to_logits.sum(0, dtype=torch.float32)
        to_weight = None if to_weight is None else to_weight.to(weight.dtype)
        to_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, to_weight, to_bias, *[None] * 7


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices in half precision to a float32 sum."""
    if left.is_cuda and left.dtype != torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):  # torch 2.8
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def _slices(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, rows, chunk))


def _all_reduce(values: Tensor, how: Any, group: Any) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, how, group=group)
    return values


def _column(local_ids: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the column of each target in this rank's part of the vocabulary (n, 1), and whether it is there (n,)."""
    return local_ids.clamp(0, columns - 1)[:, None], (local_ids >= 0) & (local_ids < columns)


logger = logging.getLogger(__name__)


class HeadScores:
    """Scores micro-batches through the LM head by slices of rows; from whole logits if the head is not a plain one.

    A plain head is a linear layer whose output is the logits: not scaled, capped or adapted. One forward of two tokens
    shows it, in which all ranks of a sharded model take part.

    chunk     rows whose logits are held together
    math      what is computed from logits
    context   ranks that share the micro-batches; a rank scores the tokens that its columns predict, and gets all
    """

    def __init__(
        self, model: nn.Module, chunk: int, math: HeadMath = EAGER, context: ContextParallel | None = None
    ) -> None:
        self._model, self._chunk, self._math, self._context = model, chunk, math, context
        self._head = _plain_head(model)
        if self._head is None:
            logger.warning(
                "the logits of %s are not the output of one linear layer: log-probs are computed from whole logits, "
                "and batch.logit_chunk has no effect",
                type(model).__name__,
            )

    def __call__(self, batch: MicroBatch, temperature: float, *, entropy: bool = True) -> Scores:
        """Run the model on a micro-batch: log-probs (N,) with gradient; entropy (N,) without, or zeros."""
        if self._head is None:
            return _whole_scores(scored_logits(self._model, batch, temperature, self._context), batch, self._context)

        def score(hidden: Tensor, head: Head) -> Tensor:
            rows = hidden.flatten(0, 1)[batch.target_positions]
            scores = head_logprobs(
                rows,
                head,
                batch.target_ids,
                temperature=temperature,
                chunk=self._chunk,
                entropy=entropy,
                mask=batch.logit_mask,
                math=self._math,
            )
            return torch.stack(scores, dim=-1)

        with _in_place_of_logits(self._head, score):
            logprobs, entropies = _forward(self._model, batch, context=self._context).unbind(-1)
        return Scores(*(in_token_order(values, batch, self._context) for values in (logprobs, entropies.detach())))


@contextmanager
def _in_place_of_logits(head: nn.Linear, score: Any) -> Iterator[None]:
    """Have the head return `score(hidden states, head)`, inside the model's forward, where its weight is gathered."""
    states: list[Tensor] = []

    def take(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        states.append(args[0])
        return (args[0][..., :0, :],)  # nothing is left to multiply

    def replace(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return score(states.pop(), Head(head.weight, head.bias))

    handles = [head.register_forward_pre_hook(take), head.register_forward_hook(replace)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _plain_head(model: Any) -> nn.Linear | None:
    """Return the LM head if the logits of the model are its output, unchanged."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    outputs: list[Tensor] = []

    def replace(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        # Not the head's own output: scaling or capping would not show in zeros, which a padding token may lead to.
        values = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        values[..., ::2] *= 1e3  # caps change large logits, added terms small ones
        outputs.append(values.to(output))
        return outputs[-1].clone()

    handle = head.register_forward_hook(replace)
    was_training = model.training
    try:
        device = next(model.parameters()).device
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
        model.train(was_training)
    is_plain = len(outputs) == 1 and torch.equal(outputs[0].float(), logits.float())
    return head if is_plain else None


def _forward(
    model: nn.Module, batch: MicroBatch, logits_to_keep: Tensor | int = 0, context: ContextParallel | None = None
) -> Tensor:
    return model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=logits_to_keep,
        **forward_arguments(model, batch.layout, batch.input_ids.device, context),
    ).logits


def _whole_scores(logits: Tensor, batch: MicroBatch, context: ContextParallel | None) -> Scores:
    if batch.logit_mask is not None:
        batch.logit_mask.check_vocabulary(logits.shape[1])
        logits = logits.clone()
        batch.logit_mask.apply_(logits, slice(0, len(logits)), 0)
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(logprobs.exp()).sum(-1)  # 0 where the probability is
    return Scores(sampled_logprobs(logprobs, batch, context), in_token_order(entropy, batch, context))


def scored_logits(
    model: nn.Module, batch: MicroBatch, temperature: float, context: ContextParallel | None = None
) -> Tensor:
    """Return logits (n, V) in float32 at the target positions."""
    one_row = batch.input_ids.shape[0] == 1
    logits = _forward(model, batch, batch.target_positions if one_row else 0, context)  # a packed row needs no others
    selected = logits[0] if one_row else logits.flatten(0, 1)[batch.target_positions]
    return selected.float() / temperature


def sampled_logprobs(logprobs: Tensor, batch: MicroBatch, context: ContextParallel | None = None) -> Tensor:
    """Return the log-probs of the sampled tokens: (n, V) -> (N,)."""
    return in_token_order(logprobs.gather(-1, batch.target_ids[:, None])[:, 0], batch, context)


def in_token_order(values: Tensor, batch: MicroBatch, context: ContextParallel | None = None) -> Tensor:
    """Reorder values from target positions of this rank to sampled tokens, also those of other ranks: (n,) -> (N,)."""
    of_batch = values.new_zeros(len(batch.sequence)).index_copy(0, batch.target_index, values)
    return of_batch if context is None else sum_over_ranks(of_batch, context.group)
