"""Log-probs of the sampled tokens of a micro-batch, from a Transformers model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.train.backends.base import Scores
from moe_replay.train.backends.head_logprobs import Head, head_logprobs
from moe_replay.train.micro_batch import MicroBatch

logger = logging.getLogger(__name__)


class HeadScores:
    """Scores micro-batches through the LM head by slices of rows; from whole logits if the head is not a plain one.

    A plain head is a linear layer whose output is the logits: not scaled, capped or adapted. One forward of two tokens
    shows it, in which all ranks of a sharded model take part.

    chunk   rows whose logits are held at once
    """

    def __init__(self, model: nn.Module, chunk: int) -> None:
        self._model, self._chunk = model, chunk
        self._head = _plain_head(model)
        if self._head is None:
            logger.warning(
                "the logits of %s are not the output of one linear layer: log-probs are computed from whole logits, "
                "and batch.logit_chunk has no effect",
                type(model).__name__,
            )

    @property
    def is_chunked(self) -> bool:
        """Whether logits are computed slice by slice."""
        return self._head is not None

    def __call__(self, batch: MicroBatch, temperature: float, *, entropy: bool = True) -> Scores:
        """Run the model on a micro-batch: log-probs (N,) with gradient; entropy (N,) without, or zeros."""
        if self._head is None:
            return _whole_scores(scored_logits(self._model, batch, temperature), batch)

        def score(hidden: Tensor, head: Head) -> Tensor:
            rows = hidden.flatten(0, 1)[batch.target_positions]
            found = head_logprobs(
                rows,
                head,
                batch.target_ids,
                temperature=temperature,
                chunk=self._chunk,
                entropy=entropy,
                mask=batch.logit_mask,
            )
            return torch.stack(found, dim=-1)

        with _in_place_of_logits(self._head, score):
            logprobs, entropies = _forward(self._model, batch).unbind(-1)
        return Scores(in_token_order(logprobs, batch), in_token_order(entropies.detach(), batch))


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
    handle = head.register_forward_hook(lambda module, args, output: outputs.append(output))
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


def _forward(model: nn.Module, batch: MicroBatch, logits_to_keep: Tensor | int = 0) -> Tensor:
    return model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, logits_to_keep=logits_to_keep
    ).logits


def _whole_scores(logits: Tensor, batch: MicroBatch) -> Scores:
    if batch.logit_mask is not None:
        batch.logit_mask.check_vocabulary(logits.shape[1])
        logits = logits.masked_fill(batch.logit_mask.dropped(slice(0, len(logits)), 0, logits.shape[1]), -torch.inf)
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(logprobs.exp()).sum(-1)  # 0 where the probability is
    return Scores(sampled_logprobs(logprobs, batch), in_token_order(entropy, batch))


def scored_logits(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Return logits (n, V) in float32 at the target positions."""
    one_row = batch.input_ids.shape[0] == 1
    logits = _forward(model, batch, batch.target_positions if one_row else 0)  # a packed row needs no others
    selected = logits[0] if one_row else logits.flatten(0, 1)[batch.target_positions]
    return selected.float() / temperature


def sampled_logprobs(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Return the log-probs of the sampled tokens: (n, V) -> (N,)."""
    return in_token_order(logprobs.gather(-1, batch.target_ids[:, None])[:, 0], batch)


def in_token_order(values: Tensor, batch: MicroBatch) -> Tensor:
    """Reorder values from target positions of this rank to sampled tokens: (n,) -> (N,)."""
    return values.new_zeros(values.shape).index_copy(0, batch.target_index, values)
