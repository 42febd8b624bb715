"""Which routes each pass of the trainer takes: off, R2 or R3, and how `auto` chooses between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_replay.train.backends.base import Routing
from moe_replay.train.config.registries import Correction
from moe_replay.train.config.train_config import TrainConfig


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The routes that are replayed, and why.

    mode         off: nothing; r2: the routes of the old-log-prob pass; r3: the routes of the rollout
    reason       why this mode was chosen, for the log
    correction   importance correction for the difference between rollout engine and old policy
    observe      whether the rollout's routes are compared with the trainer's own choice
    """

    mode: Literal["off", "r2", "r3"]
    reason: str
    correction: Correction
    observe: bool = True

    @property
    def needs_rollout_routes(self) -> bool:
        return self.mode == "r3" or self.observe

    @property
    def scoring(self) -> Routing:
        """Routing of the old-log-prob pass."""
        if self.mode == "r3":
            return Routing("replay", "rollout", observe=self.observe)
        return Routing("record" if self.mode == "r2" else "native", observe=self.observe)

    @property
    def updating(self) -> Routing:
        """Routing of every forward of an update, and of the recomputation in its backward."""
        if self.mode == "off":
            return Routing("native")
        return Routing("replay", "recorded" if self.mode == "r2" else "rollout")


def asks_for_routes(config: TrainConfig) -> bool:
    """Return whether samples come with routes: something replays, compares or counts them, or writes them to a file."""
    is_counted = config.batch.balance == "experts"
    return plan_replay(config).needs_rollout_routes or is_counted or bool(config.log.traces)


def old_logprobs_in_words(config: TrainConfig) -> str:
    """Return where the old log-probs of a run come from, for the log."""
    if config.algorithm.old_logprobs == "rollout":
        return "the rollout's"
    if config.algorithm.old_logprobs == "always":
        return "scored before the updates"
    first = "from the update's own forward"
    return first if config.algorithm.updates_per_rollout == 1 else f"{first} for the first update, else scored before"


def plan_replay(config: TrainConfig) -> ReplayPlan:
    """Return the plan of a run.

    `auto` decides by the number of updates from sample to use, as arXiv 2512.01374 found; what we measured ourselves is
    in docs/lab/does-it-help.md.
    """
    asked, correction, observe = config.replay.mode, config.algorithm.rollout_correction, config.replay.observe
    if asked != "auto":
        return ReplayPlan(asked, "as configured", correction, observe)
    updates = config.updates_per_step * (1 + config.rollout.max_staleness)
    if config.algorithm.old_logprobs == "rollout":  # no correction: the ratio of each update is against the rollout
        if updates == 1:
            return ReplayPlan("off", "one update a rollout: on-policy; routes are compared", correction, observe)
        reason = f"{updates} updates from sample to use, and no old-log-prob pass that could record routes for r2"
        return ReplayPlan("r3", reason, correction, observe)
    if updates == 1:
        corrected: Correction = "token_truncate" if correction == "off" else correction
        reason = (
            f"one update a rollout: on-policy, so importance correction ({corrected}) is enough; routes are compared"
        )
        return ReplayPlan("off", reason, corrected, observe)
    if updates < 4:
        reason = f"{updates} updates from sample to use: slightly off-policy (arXiv 2512.01374)"
        return ReplayPlan("r2", reason, correction, observe)
    reason = (
        f"{updates} updates from sample to use: far off-policy, where R3 brings rollout and trainer closest together "
        "(docs/lab/does-it-help.md)"
    )
    return ReplayPlan("r3", reason, correction, observe)
