"""Truncated sampling (top-p, top-k) in a run: how samples are asked for, and what their masks must be."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from moe_replay.errors import EngineError
from moe_replay.rollout.types import SampledSequence, SamplingParams
from moe_replay.train.config.sections import RolloutConfig
from moe_replay.train.types import AnyTrajectory

logger = logging.getLogger(__name__)


def sampling_params(rollout: RolloutConfig) -> SamplingParams:
    """Return the parameters of a run's samples, with masks where sampling is truncated and the bias not accepted."""
    if rollout.is_truncated and not rollout.replays_sampling_mask:
        logger.warning(
            "top_p and top_k truncate the distribution that is sampled from, and rollout.sampling_mask is off: ratios "
            "are biased; mismatch/rollout_vs_old/ratio/mean shows by how much"
        )
    return SamplingParams(
        n=rollout.num_generations,
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        sampling_mask=rollout.replays_sampling_mask,
    )


def check_mask(sequence: SampledSequence, params: SamplingParams, row: int) -> None:
    """Raise if a sequence has no mask although it was asked for; `row` of the data set is for errors."""
    if params.sampling_mask and sequence.sampling_mask is None:
        raise EngineError(
            "the engine returned samples without their sampling mask",
            sample=f"row {row}",
            expected=f"the support of each token under top_p {params.top_p}, top_k {params.top_k}",
            remedy='Use an engine that returns it, or accept the bias with rollout.sampling_mask = "off"',
        )


def mask_metrics(sequences: Sequence[SampledSequence | AnyTrajectory]) -> dict[str, float]:
    """Return what top-p and top-k left of the vocabulary, over all sampled tokens; nothing without masks."""
    kept, shares = [np.zeros(0)], [np.zeros(0)]
    for sequence in sequences:
        mask = sequence.sampling_mask
        if mask is not None:
            sizes = mask.sizes[sequence.sampled]
            kept.append(sizes)
            shares.append(sizes / mask.vocab_size)
    sizes, fractions = np.concatenate(kept), np.concatenate(shares)
    if not sizes.size:
        return {}
    return {
        "sampling/kept_tokens_mean": float(sizes.mean()),
        "sampling/kept_tokens_max": float(sizes.max()),
        "sampling/kept_fraction": float(fractions.mean()),
        "sampling/single_token": float(np.mean(sizes == 1)),
    }
