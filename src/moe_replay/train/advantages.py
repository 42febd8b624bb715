"""Advantages of the samples of a group: how much better each did than the others for the same prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np

Baseline = Literal["std", "none", "leave_one_out"]


def group_advantages(rewards: np.ndarray, baseline: Baseline = "std", epsilon: float = 1e-4) -> np.ndarray:
    """Rewards (groups, n), NaN where a sample was not scored -> advantages (groups, n), zero there.

    std             (r - mean) / (std + epsilon), as in GRPO
    none            r - mean, as in Dr. GRPO
    leave_one_out   r - mean of the others, as in RLOO
    """
    scored = ~np.isnan(rewards)
    count = scored.sum(axis=1, keepdims=True)
    known = np.where(scored, rewards, 0.0)
    mean = known.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(scored, rewards - mean, 0.0)
    if baseline == "std":
        # the sample standard deviation, as torch.std and the published implementations compute it
        deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
        return centred / (deviation + epsilon)
    if baseline == "leave_one_out":
        return centred * count / np.maximum(count - 1, 1)
    return centred


def has_signal(rewards: np.ndarray) -> np.ndarray:
    """(groups,) bool: the scored samples of the group do not all have the same reward."""
    lowest = np.where(np.isnan(rewards), np.inf, rewards).min(axis=1)
    highest = np.where(np.isnan(rewards), -np.inf, rewards).max(axis=1)
    return highest > lowest
