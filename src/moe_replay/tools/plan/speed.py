"""Seconds of scoring and updates at an assumed fraction of the GPUs' peak."""

from __future__ import annotations

from dataclasses import dataclass

from moe_replay.train.config.train_config import TrainConfig
from moe_replay.weights.model_sizes import ModelSizes


@dataclass(frozen=True, kw_only=True)
class SpeedPlan:
    """The passes of a step in which every sequence has its maximum length.

    score, train   PFLOP of the scoring passes, and of all updates; recomputation does not count
    tokens         of all sequences
    rate           PFLOP/s of all GPUs together, as assumed
    assumed        how, in words
    """

    score: float
    train: float
    tokens: int
    rate: float
    assumed: str
    gpus: int

    @property
    def seconds(self) -> float:
        return (self.score + self.train) / self.rate

    def __str__(self) -> str:
        parts = {"score": self.score, "updates": self.train}
        passes = ", ".join(
            f"{name} {flops:,.1f} PFLOP in {flops / self.rate:,.1f} s" for name, flops in parts.items() if flops
        )
        rate = f"{self.tokens / self.seconds / self.gpus:,.0f} tokens/s per GPU"
        return f"passes over {self.tokens:,} tokens a step: {passes} ({rate}), at {self.assumed}"


def plan_speed(config: TrainConfig, sizes: ModelSizes, *, gpus: int, peak_tflops: float, mfu: float) -> SpeedPlan:
    """Return the operations of a step and how long they take; `mfu` is the fraction of the peak that passes reach."""
    algorithm, sequences = config.algorithm, config.rollout.sequences
    scored = config.max_length - min(config.data.max_prompt_length, config.max_length - 1)
    flops = sizes.forward_flops([config.max_length], scored)
    separate = {"always": 1.0, "rollout": 0.0, "auto": 1 - 1 / algorithm.updates_per_rollout}[algorithm.old_logprobs]
    forwards = separate + (1 if algorithm.beta else 0)
    update = flops.update(frozen=config.model.lora_rank > 0) * algorithm.num_iterations
    return SpeedPlan(
        score=sequences * forwards * flops.forward / 1e15,
        train=sequences * update / 1e15,
        tokens=sequences * config.max_length,
        rate=gpus * peak_tflops * mfu / 1e3,
        assumed=f"{mfu:.0%} of {peak_tflops:g} TFLOP/s on {gpus} GPUs",
        gpus=gpus,
    )
