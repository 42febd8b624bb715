"""Log-probs of the sampled tokens of a micro-batch, from a Transformers model."""

from __future__ import annotations

from torch import Tensor, nn

from moe_replay.train.micro_batch import MicroBatch


def scored_logits(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Return logits (n, V) in float32 at the target positions."""
    one_row = batch.input_ids.shape[0] == 1
    logits = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        logits_to_keep=batch.target_positions if one_row else 0,  # for a packed row the LM head computes only these
    ).logits
    selected = logits[0] if one_row else logits.flatten(0, 1)[batch.target_positions]
    return selected.float() / temperature


def sampled_logprobs(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Return the log-probs of the sampled tokens: (n, V) -> (N,)."""
    return in_token_order(logprobs.gather(-1, batch.target_ids[:, None])[:, 0], batch)


def in_token_order(values: Tensor, batch: MicroBatch) -> Tensor:
    """Reorder values from target positions of this rank to sampled tokens: (n,) -> (N,)."""
    return values.new_zeros(values.shape).index_copy(0, batch.target_index, values)
