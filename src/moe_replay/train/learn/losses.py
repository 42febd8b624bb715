"""Policy losses (PPO, SAPO, CISPO) and their terms, token weights, and how a loss is loaded by name.

A loss sees the N sampled tokens of a micro-batch in one row: no padding, packing or ranks. Each token carries its
weight in the whole mini-batch, so that the losses of micro-batches on all ranks add up, however tokens are divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_replay.errors import MoeReplayError
from moe_replay.train.config.registries import LOSSES, Aggregation, Correction, ImportanceLevel
from moe_replay.utils.plugins import resolve, user_code
from moe_replay.verification.metrics import k3

RESERVED = ("total", "entropy", "grad_norm", "lr", "skipped")
"""Names in loss/* that the trainer itself uses."""


class LossError(MoeReplayError):
    """A policy loss that raised, or returned something else than a scalar and metrics of each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The N sampled tokens of a micro-batch of S sequences.

    logprobs          (N,) under the policy, with gradient
    old_logprobs      (N,) under the policy before the updates, which importance ratios are taken against
    rollout_logprobs  (N,) as the rollout engine reported them
    ref_logprobs      (N,) under the reference model; None where algorithm.beta is 0
    advantages        (N,) advantage of the token's sequence
    weights           (N,) weight of the token in the whole mini-batch, from `token_weights`; 0 takes the token out
    sequence          (N,) int64: the sequence that each token belongs to
    num_sequences     S
    trust             (N,) factor of each importance ratio, by the shift of routers; None where there is none
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    num_sequences: int
    trust: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of the `algorithm` section; replay.mode = "auto" may choose `rollout_correction`."""

    importance_sampling_level: ImportanceLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    delta: float = math.inf
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    beta: float = 0.0
    rollout_correction: Correction = "off"
    rollout_correction_low: float = 0.0
    rollout_correction_high: float = 2.0


class LossOutput(NamedTuple):
    """Loss of a micro-batch.

    loss            scalar, sum over tokens of weight * loss: those of micro-batches and ranks add up
    token_metrics   name -> (N,), without gradient; logged as loss/<name>, the mean over tokens. A loss returns the same
                    names for every micro-batch
    """

    loss: Tensor
    token_metrics: Mapping[str, Tensor]


Loss = Callable[[LossInputs, LossSettings], LossOutput]


# ---- losses ----------------------------------------------------------------------------------------------------------


def clipped_surrogate(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Clipped surrogate of PPO, with the importance ratio of each token (GRPO) or each sequence (GSPO).

    The sum over tokens of weight * (-correction * min(min(ratio, delta) * A, clip(ratio) * A) + beta * KL).
    Token metrics: clip_low, clip_high (bool), correction, and reference_kl where beta > 0.
    """
    ratio, advantages = importance_ratio(inputs, settings), inputs.advantages
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    bounded = ratio.clamp(max=settings.delta)
    surrogate = torch.min(bounded * advantages, ratio.clamp(low, high) * advantages)
    metrics = {
        "clip_low": ((ratio < low) & (advantages < 0)).detach(),
        "clip_high": ((ratio > high) & (advantages > 0)).detach(),
    }
    return _weighted(-surrogate, inputs, settings, metrics)


def soft_gated_surrogate(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """SAPO (arXiv:2511.20347): a sigmoid gate around ratio 1 in place of the clip.

    The sum over tokens of weight * (-correction * 4 / tau * sigmoid(tau * (ratio - 1)) * A + beta * KL), where tau is
    tau_pos for positive advantages and tau_neg for others.
    Token metrics: correction, and reference_kl where beta > 0.
    """
    ratio, advantages = importance_ratio(inputs, settings), inputs.advantages
    tau = torch.full_like(ratio, settings.tau_neg).masked_fill(advantages > 0, settings.tau_pos)
    return _weighted(-4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, inputs, settings, {})


def clipped_weights(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """CISPO (arXiv:2506.13585): REINFORCE with the clipped ratio as a constant weight; no token loses its gradient.

    The sum over tokens of weight * (-correction * clip(ratio) * A * log-prob + beta * KL).
    Token metrics: clip_low, clip_high (bool), correction, and reference_kl where beta > 0.
    """
    ratio = importance_ratio(inputs, settings).detach()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    metrics = {"clip_low": ratio < low, "clip_high": ratio > high}
    return _weighted(-ratio.clamp(low, high) * inputs.advantages * inputs.logprobs, inputs, settings, metrics)


def _weighted(
    per_token: Tensor, inputs: LossInputs, settings: LossSettings, metrics: Mapping[str, Tensor]
) -> LossOutput:
    """Return the sum of (N,) losses times their weights, with rollout correction and the KL to the reference."""
    correction = correction_weights(inputs, settings)
    metrics = {**metrics, "correction": correction}
    per_token = per_token * correction
    if settings.beta:
        if inputs.ref_logprobs is None:
            raise ValueError("beta > 0 needs the log-probs of a reference model")
        reference_kl = k3(inputs.ref_logprobs - inputs.logprobs)
        per_token = per_token + settings.beta * reference_kl
        metrics["reference_kl"] = reference_kl.detach()
    return LossOutput((per_token * inputs.weights).sum(), metrics)


def sequence_sum(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Sum the tokens of each sequence: (N,) -> (S,)."""
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def sequence_mean(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Average the tokens of each sequence: (N,) -> (S,); zero for a sequence without tokens."""
    count = sequence_sum(torch.ones_like(values), sequence, num_sequences)
    return sequence_sum(values, sequence, num_sequences) / count.clamp(min=1)


def importance_ratio(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return (N,) policy / old policy: of each token (GRPO), or the geometric mean over its sequence (GSPO).

    Where there is `trust`, ratios are scaled by it before anything is clipped or averaged, as RSPO does
    (arXiv:2510.23027).
    """
    difference = inputs.logprobs - inputs.old_logprobs
    if inputs.trust is not None:
        difference = difference + inputs.trust.detach().log()
    if settings.importance_sampling_level == "sequence":
        difference = sequence_mean(difference, inputs.sequence, inputs.num_sequences)[inputs.sequence]
    return difference.exp()


def correction_weights(inputs: LossInputs, settings: LossSettings) -> Tensor:
    """Return (N,) weights that correct for tokens having been sampled by the rollout engine, not by the old policy.

    token_truncate   min(ratio, rollout_correction_high): truncated importance sampling
    token_mask       ratio inside [rollout_correction_low, rollout_correction_high], else 0: IcePop
    sequence_mask    ratio of the whole sequence inside these bounds, else 0 for all its tokens
    """
    if settings.rollout_correction == "off":
        return torch.ones_like(inputs.old_logprobs)
    difference = (inputs.old_logprobs - inputs.rollout_logprobs).detach()
    if settings.rollout_correction == "sequence_mask":
        difference = sequence_sum(difference, inputs.sequence, inputs.num_sequences)[inputs.sequence]
    ratio = difference.exp()
    if settings.rollout_correction == "token_truncate":
        return ratio.clamp(max=settings.rollout_correction_high)
    inside = (ratio >= settings.rollout_correction_low) & (ratio <= settings.rollout_correction_high)
    return torch.where(inside, ratio, 0.0)


def token_weights(lengths: np.ndarray, aggregation: Aggregation, max_tokens: int) -> np.ndarray:
    """Return (S,) the weight of each token of a sequence, from the lengths (S,) of all sequences of the mini-batch.

    seq_mean_token_mean       mean over the tokens of a sequence, then over sequences
    token_mean                mean over all tokens
    seq_mean_token_sum_norm   sum over tokens / (sequences * max_tokens), independent of lengths
    """
    total = max(int(lengths.sum()), 1)
    per_token = {
        "seq_mean_token_mean": 1.0 / (len(lengths) * np.maximum(lengths, 1)),
        "token_mean": np.full(len(lengths), 1.0 / total),
        "seq_mean_token_sum_norm": np.full(len(lengths), 1.0 / (len(lengths) * max_tokens)),
    }
    return per_token[aggregation]


# ---- loading by name -------------------------------------------------------------------------------------------------


def load_loss(name: str) -> Loss:
    """Return the loss that `algorithm.loss` names, wrapped so that its result is checked."""
    loss: Loss = resolve(name, LOSSES, kind="policy loss", key="algorithm.loss")

    def checked(inputs: LossInputs, settings: LossSettings) -> LossOutput:
        tokens = len(inputs.logprobs)
        with user_code(f"policy loss {name!r}", LossError, found=f"a micro-batch of {tokens} tokens"):
            output = loss(inputs, settings)
        _check(name, output, tokens)
        return output

    return checked


def metric_names(loss: Loss, settings: LossSettings, device: torch.device) -> tuple[str, ...]:
    """Return the names of the token metrics of a loss, found by calling it on four made-up tokens.

    Every rank needs them, also one that never computes a loss, such as the first stage of a pipeline.
    """
    logprobs = torch.full((4,), -1.0, device=device, requires_grad=True)
    like = logprobs.detach()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=like,
        rollout_logprobs=like,
        ref_logprobs=like if settings.beta else None,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0], device=device),
        weights=torch.full_like(like, 0.25),
        sequence=torch.tensor([0, 0, 1, 1], device=device),
        num_sequences=2,
    )
    with torch.random.fork_rng(devices=[]):
        return tuple(loss(inputs, settings).token_metrics)


def _check(name: str, output: LossOutput, tokens: int) -> None:
    if not isinstance(output, LossOutput) or not (
        _has_shape(output.loss, ()) and isinstance(output.token_metrics, Mapping)
    ):
        found: object = type(output)
        if isinstance(output, LossOutput):
            found = f"a loss of {_in_words(output.loss)}, token_metrics of type {type(output.token_metrics).__name__}"
        raise LossError(
            f"policy loss {name!r} must return a LossOutput with a scalar loss and a mapping of metrics",
            expected="LossOutput(loss of shape (), token_metrics)",
            found=found,
        )
    for metric, values in output.token_metrics.items():
        if not _has_shape(values, (tokens,)):
            raise LossError(
                f"policy loss {name!r} must return one value per token for each of its metrics",
                expected=f"{metric} of shape ({tokens},)",
                found=_in_words(values),
            )
        if metric in RESERVED:
            raise LossError(
                f"policy loss {name!r} returns a metric with a name that the trainer uses itself",
                expected=f"none of {', '.join(RESERVED)}",
                found=metric,
            )


def _has_shape(value: object, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _in_words(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
