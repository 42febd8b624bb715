"""`TrainConfig`: all sections of a training run, checked together."""

from __future__ import annotations

from pydantic import model_validator

from moe_replay.train.config.checks import problems
from moe_replay.train.config.sections import Sections


class TrainConfig(Sections):
    """Configuration of a training run."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if lines := list(problems(self)):
            raise ValueError("\n".join(lines))
        return self
