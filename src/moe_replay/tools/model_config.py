"""The Transformers config of a model that a command is given: a folder, a config.json, or a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.megatron.weights.model import read_config


class ModelConfigError(MoeReplayError):
    """A model's config that cannot be found or read."""


def model_config(source: str | Path) -> Any:
    """The config; nothing of the model itself is loaded, and none of its code is run."""
    try:
        return read_config(source)
    except (OSError, ValueError, KeyError) as wrong:
        if isinstance(wrong, MoeReplayError):
            raise
        raise ModelConfigError(
            "the model's config cannot be read",
            expected="a folder with config.json, such a file, or the name of a model",
            found=f"{source}: {_first_line(wrong)}",
        ) from wrong


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
