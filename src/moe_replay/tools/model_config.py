"""Reading the Transformers config of a model given as a folder, a config.json or a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.megatron.weights.model import config_of
from moe_replay.rollout.model_folder import ModelError


class ModelConfigError(MoeReplayError):
    """A model config that cannot be found or read."""


def model_config(source: str | Path) -> Any:
    """Read a config without loading the model or running its code."""
    try:
        return config_of(source)
    except ModelError as wrong:
        raise ModelConfigError(
            "the model's config cannot be read",
            expected="a folder with config.json, a config.json, or the name of a model",
            found=wrong.found,
            remedy=wrong.remedy,
        ) from wrong
