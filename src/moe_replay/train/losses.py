"""The GRPO family of losses, as pure functions on the completion tokens of a micro-batch.

Tokens of all sequences stand in one row of N, with `sequence` (N,) saying which of S sequences each belongs to: nothing
here knows of padding, packing or ranks. Every token carries the weight that it has in the whole mini-batch
(`token_weights`), so the losses of micro-batches on all ranks simply add up, however the tokens were divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Aggregation = Literal["grpo", "dr_grpo", "dapo"]
Level = Literal["token", "sequence"]
Correction = Literal["off", "token_truncate", "token_mask", "sequence_mask"]


def token_weights(lengths: np.ndarray, aggregation: Aggregation, max_tokens: int) -> np.ndarray:
    """(S,) the weight of each token of a sequence, from the lengths (S,) of ALL sequences of the mini-batch.

    grpo      mean over a sequence's tokens, then over sequences
    dapo      mean over all tokens
    dr_grpo   sum over tokens / (sequences * max_tokens), so that length does not matter
    """
    total = max(int(lengths.sum()), 1)
    per_token = {
        "grpo": 1.0 / (len(lengths) * np.maximum(lengths, 1)),
        "dapo": np.full(len(lengths), 1.0 / total),
        "dr_grpo": np.full(len(lengths), 1.0 / (len(lengths) * max_tokens)),
    }
    return per_token[aggregation]


def sequence_sum(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """(N,) -> (S,)."""
    return values.new_zeros(sequences).index_add(0, sequence, values)


def sequence_mean(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """(N,) -> (S,); zero for a sequence without tokens."""
    count = sequence_sum(torch.ones_like(values), sequence, sequences)
    return sequence_sum(values, sequence, sequences) / count.clamp(min=1)


def log_ratio(new: Tensor, old: Tensor, sequence: Tensor, sequences: int, level: Level) -> Tensor:
    """(N,) log of the importance ratio: of each token (GRPO), or the mean over its sequence (GSPO)."""
    difference = new - old
    if level == "sequence":
        return sequence_mean(difference, sequence, sequences)[sequence]
    return difference


def correction_weights(
    old: Tensor, rollout: Tensor, sequence: Tensor, sequences: int, kind: Correction, low: float, high: float
) -> Tensor:
    """(N,) weights that correct for tokens having been sampled by the rollout engine and not by the old policy.

    token_truncate   min(ratio, high)                                  truncated importance sampling
    token_mask       ratio inside [low, high], else 0                  IcePop
    sequence_mask    ratio of the whole sequence, 0 for all its tokens outside [low, high]
    """
    if kind == "off":
        return torch.ones_like(old)
    difference = (old - rollout).detach()
    if kind == "sequence_mask":
        difference = sequence_sum(difference, sequence, sequences)[sequence]
    ratio = difference.exp()
    if kind == "token_truncate":
        return ratio.clamp(max=high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def k3(of: Tensor, against: Tensor) -> Tensor:
    """The k3 estimate, token by token, of the divergence of `of` from `against`, for tokens sampled from `of`."""
    difference = against - of
    return difference.exp() - difference - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """loss is a scalar; the rest are (N,) for metrics, without gradient."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    correction: Tensor
    reference_kl: Tensor | None


def policy_loss(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequence: Tensor,
    sequences: int,
    *,
    rollout: Tensor | None = None,
    reference: Tensor | None = None,
    level: Level = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    correction: Correction = "off",
    correction_low: float = 0.0,
    correction_high: float = 2.0,
) -> PolicyLoss:
    """The clipped surrogate: - weights * correction * min(ratio * A, clip(ratio) * A) + weights * beta * KL.

    new         (N,) log-probs of the sampled tokens under the policy, with gradient
    old         (N,) under the policy that the ratio is taken against
    rollout     (N,) as the rollout engine reported them; needed for a correction
    reference   (N,) under the reference model; needed where beta is not 0
    advantages  (N,) of the token's sequence
    weights     (N,) of the token in the whole mini-batch (`token_weights`); 0 takes it out
    """
    ratio = log_ratio(new, old, sequence, sequences, level).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    corrected = torch.ones_like(old)
    if correction != "off":
        if rollout is None:
            raise ValueError("a train/inference correction needs the log-probs of the rollout")
        corrected = correction_weights(old, rollout, sequence, sequences, correction, correction_low, correction_high)
    per_token = -surrogate * corrected
    reference_kl = None
    if beta:
        if reference is None:
            raise ValueError("beta > 0 needs the log-probs of a reference model")
        reference_kl = k3(new, reference)
        per_token = per_token + beta * reference_kl
    return PolicyLoss(
        loss=(per_token * weights).sum(),
        ratio=ratio.detach(),
        clipped_low=((ratio < 1 - clip_low) & (advantages < 0)).detach(),
        clipped_high=((ratio > 1 + clip_high) & (advantages > 0)).detach(),
        correction=corrected,
        reference_kl=None if reference_kl is None else reference_kl.detach(),
    )
