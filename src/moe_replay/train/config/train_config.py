"""`TrainConfig`: all sections of a training run, checked together."""

from __future__ import annotations

from pydantic import model_validator

from moe_replay.train.config.checks import problems
from moe_replay.train.config.sections import Sections


class TrainConfig(Sections):
    """A training run: rollouts, rewards and policy updates, with the routes of the rollout replayed in the trainer."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if found := list(problems(self)):
            raise ValueError("\n".join(found))
        return self
