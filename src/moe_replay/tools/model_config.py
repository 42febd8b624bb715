"""Reading the Transformers config of a model given as a folder, a config.json or a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.megatron.weights.model import config_of


class ModelConfigError(MoeReplayError):
    """A model config that cannot be found or read."""


def model_config(source: str | Path) -> Any:
    """Read a config without loading the model or running its code."""
    try:
        return config_of(source)
    except (OSError, ValueError, KeyError) as wrong:
        if isinstance(wrong, MoeReplayError):
            raise
        raise ModelConfigError(
            "the model's config cannot be read",
            expected="a folder with config.json, a config.json, or the name of a model",
            found=f"{source}: {_first_line(wrong)}",
        ) from wrong


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
