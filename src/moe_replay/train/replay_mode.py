"""Which routes the trainer takes in which pass: off, R2 or R3, and how `auto` chooses between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_replay.train.backends.base import Routing
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.losses import Correction


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What is replayed, and why.

    mode         off: nothing; r2: the routes of the old-log-prob pass; r3: the routes of the rollout
    reason       in words
    correction   of the loss for the difference between rollout and old policy
    """

    mode: Literal["off", "r2", "r3"]
    reason: str
    correction: Correction
    observe: bool = True

    @property
    def scoring(self) -> Routing:
        """The old-log-prob pass. What it records without replay is only looked at."""
        if self.mode == "r3":
            return Routing("replay", observe=self.observe)
        return Routing("record" if self.mode == "r2" or self.observe else "native")

    @property
    def updating(self) -> Routing:
        """Every forward of a policy update, and the recomputation in its backward."""
        return Routing("native" if self.mode == "off" else "replay")


def resolve(config: TrainConfig) -> ReplayPlan:
    """The plan of a run. `auto` goes by how many updates lie between a sample and its use (arXiv 2512.01374)."""
    asked, correction, observe = config.replay.mode, config.algorithm.correction, config.replay.observe
    if asked != "auto":
        return ReplayPlan(asked, "asked for", correction, observe)
    updates = config.algorithm.updates_per_rollout * (1 + config.rollout.max_staleness)
    if updates == 1:
        corrected: Correction = "token_truncate" if correction == "off" else correction
        reason = (
            f"one update a rollout: on-policy, so importance correction ({corrected}) is enough; routes are compared"
        )
        return ReplayPlan("off", reason, corrected, observe)
    if updates < 4:
        return ReplayPlan("r2", f"{updates} updates from sample to use: slightly off-policy", correction, observe)
    reason = f"{updates} updates from sample to use: far off-policy, where replaying the trainer's own routes collapses"
    return ReplayPlan("r3", reason, correction, observe)
