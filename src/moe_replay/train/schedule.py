"""The learning rate of each step."""

from __future__ import annotations

import math

from moe_replay.train.config.sections import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then constant or decaying to 0 after the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - 1 - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    return config.lr * (1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)
