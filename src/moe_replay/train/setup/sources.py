"""Locate model and data: folders, Hub downloads, or the embedded demo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from moe_replay.distributed.ranks import raise_on_all_ranks, rank
from moe_replay.errors import MoeReplayError, needs_extra
from moe_replay.train.checkpoint import manifest
from moe_replay.train.checkpoint.manifest import EXPORT
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.misc import StatusCallback, one_line

WEIGHTS = re.compile(rf"{EXPORT}/.*\.safetensors")


class SourceError(MoeReplayError):
    """A model or tokenizer that is neither in a folder nor downloadable."""


class Sources(NamedTuple):
    """Paths of the model's folder, of the prompts and of the evaluation prompts."""

    model: str
    data: str
    eval: str | None


def find_sources(config: TrainConfig, status: StatusCallback) -> Sources:
    """Return the paths; download a missing model, or make the embedded demo, which takes a minute."""
    if config.model.path:
        return Sources(model_folder(config.model.path), config.data.path, config.data.eval_path)
    from moe_replay import demo

    files = demo.prepare(status=status)
    return Sources(str(files.model), config.data.path or str(files.train), config.data.eval_path or str(files.eval))


def load_tokenizer(folder: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    remedy = "Put the tokenizer into the folder"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        if "trust_remote_code" in str(error):
            remedy = "Set model.trust_remote_code = true if you trust the code that comes with it"
        raise SourceError(f"no tokenizer in {folder}: {one_line(error)}", remedy=remedy) from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):  # Transformers makes one from nothing
        raise SourceError(f"no tokenizer in {folder}: it would have no vocabulary", remedy=remedy)
    return tokenizer


def check_export(folder: str) -> None:
    """Raise if the folder is the export of a checkpoint and its weights are damaged."""
    checkpoint = Path(folder).absolute().parent
    if Path(folder).name != EXPORT or not (checkpoint / manifest.FILE).is_file():
        return
    try:
        entries = manifest.read(checkpoint)
        manifest.check(checkpoint, {name: entries[name] for name in entries if WEIGHTS.fullmatch(name)})
    except manifest.DamageError as error:
        raise SourceError(f"{folder} is damaged: {error}", remedy="Use the export of another checkpoint") from error


def check_weight_files(folder: str, setting: str) -> None:
    """Raise if there is no such folder, or it has no weights; `setting` names it in the error."""
    patterns = ("*.safetensors", "pytorch_model*.bin")
    if not any(any(Path(folder).glob(pattern)) for pattern in patterns):
        contents = "other files" if Path(folder).is_dir() else "no folder"
        raise SourceError(f"{setting}: no weights in {folder}", expected=" or ".join(patterns), found=contents)


def model_folder(path: str) -> str:
    """Return the folder of a model that is given as a folder or by its name on the hub."""
    if Path(path).is_dir():
        return path
    with needs_extra("a download needs huggingface_hub", "train"):
        from huggingface_hub import snapshot_download
    try:
        return snapshot_download(path)
    except (OSError, ValueError) as error:
        raise SourceError(
            "the model was not found",
            expected="a folder, or a name on the hub that is cached or can be downloaded",
            found=f"{path!r}: {error}",
            remedy="Set model.path",
        ) from error


def sources_on_all_ranks(config: TrainConfig, status: StatusCallback) -> Sources:
    """Find model and data on every rank; rank 0 goes first and downloads or builds missing files. Collective."""
    sources: Sources | None = None
    with raise_on_all_ranks("looking for model and data"):
        if rank() == 0:
            sources = find_sources(config, status)
            check_export(sources.model)
    return sources if sources is not None else find_sources(config, status)
