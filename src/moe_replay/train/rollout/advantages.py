"""Advantage estimators: how much better each sample of a group did than the others for the same prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_replay.errors import MoeReplayError
from moe_replay.train.config.registries import ADVANTAGES, TurnAdvantages
from moe_replay.utils.plugins import resolve, user_code

AdvantageEstimator = Callable[[np.ndarray], np.ndarray]
"""Rewards (groups, n), NaN where a sample was not scored -> advantages (groups, n); unscored samples are ignored."""


class AdvantageError(MoeReplayError):
    """An advantage estimator that raised, or returned something other than one finite number per sample."""


def std_normalized(rewards: np.ndarray, epsilon: float = 1e-4) -> np.ndarray:
    """Return (r - mean) / (std + epsilon), as in GRPO."""
    centered, count = _centered(rewards)
    # the sample standard deviation, as torch.std and the published implementations compute it
    deviation = np.sqrt((centered**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
    return centered / (deviation + epsilon)


def mean_centered(rewards: np.ndarray) -> np.ndarray:
    """Return r - mean, as in Dr. GRPO."""
    return _centered(rewards)[0]


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Return r - mean of the other samples, as in RLOO."""
    centered, count = _centered(rewards)
    return centered * count / np.maximum(count - 1, 1)


def load_advantages(name: str) -> AdvantageEstimator:
    """Return the estimator that `algorithm.advantage` names, wrapped so that its result is checked."""
    estimator: AdvantageEstimator = resolve(name, ADVANTAGES, kind="advantage estimator", key="algorithm.advantage")

    def checked(rewards: np.ndarray) -> np.ndarray:
        with user_code(f"advantage estimator {name!r}", AdvantageError, found=f"rewards of shape {rewards.shape}"):
            advantages = np.asarray(estimator(rewards.copy()), np.float64)
        if advantages.shape != rewards.shape:
            raise AdvantageError(
                f"advantage estimator {name!r} must return one advantage per sample",
                expected=f"shape {rewards.shape}",
                found=f"shape {advantages.shape}",
            )
        scored = ~np.isnan(rewards)
        if not np.isfinite(advantages[scored]).all():
            group, sample = np.argwhere(scored & ~np.isfinite(advantages))[0].tolist()
            raise AdvantageError(
                f"advantage estimator {name!r} returned an advantage that is not finite",
                sample=f"{sample} of group {group}",
                found=f"{advantages[group, sample]} for rewards {rewards[group].tolist()}",
                remedy="Ignore unscored samples (NaN), e.g. with np.nanmean",
            )
        return np.where(scored, advantages, 0.0)

    return checked


def turn_factors(samples: int, turns: TurnAdvantages, discount: float) -> list[float]:
    """Return the factors of an episode's advantage for each of its samples, in order (`algorithm.advantage_turns`)."""
    if turns == "last":
        return [0.0] * (samples - 1) + [1.0]
    return [discount ** (samples - 1 - number) if turns == "discounted" else 1.0 for number in range(samples)]


def has_signal(rewards: np.ndarray) -> np.ndarray:
    """Return (groups,) bool: whether the scored samples of a group differ in reward."""
    lowest = np.where(np.isnan(rewards), np.inf, rewards).min(axis=1)
    highest = np.where(np.isnan(rewards), -np.inf, rewards).max(axis=1)
    return highest > lowest


def _centered(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (groups, n) rewards minus the mean of their group, 0 where unscored, and (groups, 1) scored samples."""
    scored = ~np.isnan(rewards)
    count = scored.sum(axis=1, keepdims=True)
    mean = np.where(scored, rewards, 0.0).sum(axis=1, keepdims=True) / np.maximum(count, 1)
    return np.where(scored, rewards - mean, 0.0), count
