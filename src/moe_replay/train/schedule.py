"""The learning rate of each update."""

from __future__ import annotations

import math

from moe_replay.train.config.sections import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Of step 1 to `steps`: rising over the warm-up, then as the schedule says, towards 0 after the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    gone = (step - 1 - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    return config.lr * (1 - gone if config.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2)
