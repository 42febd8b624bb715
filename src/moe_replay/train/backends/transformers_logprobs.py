"""Log-probs of the scored tokens of a micro-batch, from a Transformers model."""

from __future__ import annotations

from torch import Tensor, nn

from moe_replay.train.micro_batch import MicroBatch


def scored_logits(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """(n, V) float32 at the places whose next token is scored."""
    one_row = batch.input_ids.shape[0] == 1
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.places if one_row else 0,  # of a packed row, the head computes these alone
    ).logits
    selected = logits[0] if one_row else logits.flatten(0, 1)[batch.places]
    return selected.float() / temperature


def of_sampled(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """(n, V) -> (N,): of the tokens that were sampled."""
    return in_order(logprobs.gather(-1, batch.targets[:, None])[:, 0], batch)


def in_order(values: Tensor, batch: MicroBatch) -> Tensor:
    """(n,) -> (N,): from the order of places on this rank to that of scored tokens."""
    return values.new_zeros(values.shape).index_copy(0, batch.slots, values)
