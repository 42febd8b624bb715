"""Files of the embedded default: built once, then reused from a cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from moe_replay.demo.model import FULL, QUICK, DemoSettings, build_model, build_tokenizer
from moe_replay.demo.task import rows
from moe_replay.demo.warm_start import warm_start
from moe_replay.utils.files import apply_umask
from moe_replay.utils.misc import StatusCallback


@dataclass(frozen=True, slots=True)
class DemoFiles:
    """Paths: the folder with model and tokenizer, and JSONL files with prompts and solutions."""

    model: Path
    train: Path
    eval: Path

    @classmethod
    def inside(cls, folder: Path) -> DemoFiles:
        return cls(folder / "model", folder / "train.jsonl", folder / "eval.jsonl")


def prepare(cache: Path | None = None, quick: bool = False, status: StatusCallback | None = None) -> DemoFiles:
    """Return the embedded default, building it if it is not cached.

    cache    folder with all versions; None: moe-replay in the user's cache folder
    quick    build a version for tests in seconds, whose model knows little
    status   called with progress lines; None: stderr
    """
    status = status or partial(print, file=sys.stderr, flush=True)
    settings = QUICK if quick else FULL
    parent = (cache or default_cache()).absolute()
    folder = parent / f"demo-{_fingerprint(settings)}"
    if folder.is_dir():
        status(f"embedded default: cached in {folder}")
        return DemoFiles.inside(folder)
    parent.mkdir(parents=True, exist_ok=True)
    status(
        f"embedded default: pre-training a tiny MoE on sums until {settings.enough:.0%} of its answers are correct, "
        "then on estimates too; done once, two to three minutes on one core"
    )
    with TemporaryDirectory(dir=parent, prefix="unfinished-", ignore_cleanup_errors=True) as unfinished:
        _build(DemoFiles.inside(Path(unfinished, "demo")), settings, status)
        try:
            Path(unfinished, "demo").rename(folder)
        except OSError:
            if not folder.is_dir():  # else another run finished first, with the same result
                raise
    status(f"embedded default: saved in {folder}")
    return DemoFiles.inside(folder)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-replay"


def _build(files: DemoFiles, settings: DemoSettings, status: StatusCallback) -> None:
    files.model.mkdir(parents=True)
    tokenizer, model = build_tokenizer(), build_model(settings)
    warm_start(model, tokenizer, settings, status)
    tokenizer.save_pretrained(files.model)
    model.save_pretrained(files.model)
    for file in files.model.glob("*.safetensors"):
        apply_umask(file)  # others may read the cache
    for file, count, held_out in ((files.train, settings.train_rows, False), (files.eval, settings.eval_rows, True)):
        _write(file, rows(count, settings.seed, settings.terms, held_out=held_out))


def _write(file: Path, lines: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _fingerprint(settings: DemoSettings) -> str:
    """Hash everything that determines the files: settings, source code of this package, library versions."""
    digest = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for library in ("torch", "transformers"):
        digest.update(version(library).encode())
    return digest.hexdigest()[:12]
