"""The clipped surrogate of PPO, as GRPO, Dr. GRPO, DAPO and GSPO use it."""

from __future__ import annotations

import torch

from moe_replay.train.losses.terms import correction_weights, importance_ratio, k3
from moe_replay.train.losses.types import LossInputs, LossOutput, LossSettings


def clipped_surrogate(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Clipped surrogate of PPO, with the importance ratio of each token (GRPO) or each sequence (GSPO).

    The sum over tokens of weight * (-correction * min(ratio * A, clip(ratio) * A) + beta * KL(policy || reference)).
    Token metrics: clip_low, clip_high (bool), correction, and reference_kl where beta > 0.
    """
    ratio, advantages = importance_ratio(inputs, settings), inputs.advantages
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    correction = correction_weights(inputs, settings)
    metrics = {
        "clip_low": ((ratio < low) & (advantages < 0)).detach(),
        "clip_high": ((ratio > high) & (advantages > 0)).detach(),
        "correction": correction,
    }
    per_token = -surrogate * correction
    if settings.beta:
        if inputs.ref_logprobs is None:
            raise ValueError("beta > 0 needs the log-probs of a reference model")
        reference_kl = k3(inputs.logprobs, inputs.ref_logprobs)
        per_token = per_token + settings.beta * reference_kl
        metrics["reference_kl"] = reference_kl.detach()
    return LossOutput((per_token * inputs.weights).sum(), metrics)
