"""The model and the data that a config names, as files; the embedded default where it names none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.train.config.train_config import TrainConfig


class SourceError(MoeReplayError):
    """A model that is neither a folder nor a name that can be downloaded."""


class Sources(NamedTuple):
    """Paths of the model's folder, of the prompts and of those for evaluation."""

    model: str
    data: str
    eval: str | None


def find_sources(config: TrainConfig, tell: Callable[[str], None]) -> Sources:
    """Download what is missing, or make the embedded default, which takes a minute: `tell` is told how far it is."""
    if config.model.path:
        return Sources(model_folder(config.model.path), config.data.path, config.data.eval_path)
    from moe_replay import demo

    files = demo.prepare(progress=tell)
    return Sources(str(files.model), config.data.path or str(files.train), config.data.eval_path or str(files.eval))


def load_tokenizer(folder: str) -> Any:
    """The tokenizer beside the model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise SourceError(f"no tokenizer in {folder}: {error}", remedy="Put the model's tokenizer beside it") from error


def model_folder(path: str) -> str:
    """The folder of a model that is given as such, or by a name on the hub."""
    if Path(path).is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError as missing:
        raise MissingExtraError("the hub needs huggingface_hub", remedy="pip install 'moe-replay[train]'") from missing
    try:
        return snapshot_download(path)
    except (OSError, ValueError) as error:
        raise SourceError(
            "the model is not there",
            expected="a folder, or a name on the hub that can be downloaded or is in the cache",
            found=f"{path!r}: {error}",
            remedy="Set model.path",
        ) from error
