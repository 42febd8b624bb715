"""Parts that policy losses are made of: importance ratios, their correction, divergence from a reference."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_replay.train.losses.types import LossInputs, LossSettings


def sequence_sum(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sum the tokens of each sequence: (N,) -> (S,)."""
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def sequence_mean(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Average the tokens of each sequence: (N,) -> (S,); zero for a sequence without tokens."""
    count = sequence_sum(torch.ones_like(values), sequence, num_sequences)
    return sequence_sum(values, sequence, num_sequences) / count.clamp(min=1)


def importance_ratio(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return (N,) policy / old policy: of each token (GRPO), or the geometric mean over its sequence (GSPO)."""
    difference = inputs.logprobs - inputs.old_logprobs
    if settings.level == "sequence":
        difference = sequence_mean(difference, inputs.sequence, inputs.num_sequences)[inputs.sequence]
    return difference.exp()


def correction_weights(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return (N,) weights that correct for tokens having been sampled by the rollout engine, not by the old policy.

    token_truncate   min(ratio, correction_high): truncated importance sampling
    token_mask       ratio inside [correction_low, correction_high], else 0: IcePop
    sequence_mask    ratio of the whole sequence inside these bounds, else 0 for all its tokens
    """
    if settings.correction == "off":
        return torch.ones_like(inputs.old_logprobs)
    difference = (inputs.old_logprobs - inputs.rollout_logprobs).detach()
    if settings.correction == "sequence_mask":
        difference = sequence_sum(difference, inputs.sequence, inputs.num_sequences)[inputs.sequence]
    ratio = difference.exp()
    if settings.correction == "token_truncate":
        return ratio.clamp(max=settings.correction_high)
    inside = (ratio >= settings.correction_low) & (ratio <= settings.correction_high)
    return torch.where(inside, ratio, 0.0)


def k3(of: Tensor, against: Tensor) -> Tensor:
    """Return the k3 estimate of KL(of || against) for each token, where tokens were sampled from `of`."""
    difference = against - of
    return difference.exp() - difference - 1
