"""Routes that each pass of the trainer uses: off, R2 or R3, and the choice that `auto` makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_replay.replay.policy import IDS, ReplayPolicy
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
    policy       how recorded routes are used
    drops        whether tokens without a route leave the loss
    shift_floor  smallest factor of importance ratios by the shift of routers; None: there are no such factors
    """

    mode: Literal["off", "r2", "r3"]
    reason: str
    correction: Correction
    observe: bool = True
    policy: ReplayPolicy = IDS
    drops: bool = False
    shift_floor: float | None = None

    @property
    def needs_rollout_routes(self) -> bool:
        return self.mode == "r3" or self.observe

    @property
    def scoring(self) -> Routing:
        """Routing of the old-log-prob pass."""
        weights = None if self.shift_floor is None else "keep"
        if self.mode == "r3":
            return Routing("replay", "rollout", observe=self.observe, policy=self.policy, weights=weights)
        action = "record" if self.mode == "r2" else "native"
        return Routing(action, observe=self.observe, policy=self.policy, weights=weights)

    @property
    def updating(self) -> Routing:
        """Routing of every forward of an update, and of the recomputation in its backward."""
        weights = None if self.shift_floor is None else "compare"
        if self.mode == "off":
            return Routing("native", weights=weights)
        return Routing("replay", "recorded" if self.mode == "r2" else "rollout", policy=self.policy, weights=weights)


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


def _policy(config: TrainConfig) -> ReplayPolicy:
    """Return how routers use recorded routes; `auto` goes with the default alone."""
    if config.replay.margin is not None:
        return ReplayPolicy(margin=config.replay.margin)
    return ReplayPolicy(gates=config.replay.policy == "ids+gates")


def plan_replay(config: TrainConfig) -> ReplayPlan:
    replay, mode, reason = config.replay, config.replay.mode, "as configured"
    correction = config.algorithm.rollout_correction
    if mode == "auto":
        mode, reason, correction = _chosen(config)
    return ReplayPlan(
        *(mode, reason, correction, replay.observe, _policy(config)),
        drops=replay.policy == "drop",
        shift_floor=replay.shift_floor if replay.policy == "shift" else None,
    )


def _chosen(config: TrainConfig) -> tuple[Literal["off", "r2", "r3"], str, Correction]:
    """Return the mode that `auto` chooses, why, and the correction that goes with it.

    It decides by the number of updates from sample to use, as arXiv 2512.01374 found; what we measured ourselves is in
    docs/lab/does-it-help.md.
    """
    correction = config.algorithm.rollout_correction
    updates = config.updates_per_step * (1 + config.rollout.max_staleness)
    if config.algorithm.old_logprobs == "rollout":  # no correction: the ratio of each update is against the rollout
        if updates == 1:
            return "off", "one update a rollout: on-policy; routes are compared", correction
        reason = f"{updates} updates from sample to use, and no old-log-prob pass that could record routes for r2"
        return "r3", reason, correction
    if updates == 1:
        correction = "token_truncate" if correction == "off" else correction
        is_enough = f"on-policy, so importance correction ({correction}) is enough"
        return "off", f"one update a rollout: {is_enough}; routes are compared", correction
    if updates < 4:
        return "r2", f"{updates} updates from sample to use: slightly off-policy (arXiv 2512.01374)", correction
    reason = "far off-policy, where R3 brings rollout and trainer closest together (docs/lab/does-it-help.md)"
    return "r3", f"{updates} updates from sample to use: {reason}", correction
