"""The folder of a run: who may write to it, what lies where, and where its metrics go.

    runs/20260131-120000-name/
      config.toml      every setting, those left out included
      metrics.jsonl    one JSON object a step
      log.txt          what the library logs
      checkpoints/     see checkpoint.py
      traces/          routes of some samples, where log.traces asks for them
      report.html

All ranks open it and get the same folder; the first one writes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from moe_replay.distributed.ranks import from_rank_0, rank
from moe_replay.errors import MoeReplayError
from moe_replay.train.run.sinks.registry import Sinks, load_sink
from moe_replay.train.run.sinks.types import Metrics, SinkContext
from moe_replay.utils.files import write_whole

if TYPE_CHECKING:
    from moe_replay.train.config.train_config import TrainConfig

RUNS = Path("runs")

# A checkpoint holds a place in the data and shards of the model: these say of which data and which shards.
FIXED: dict[str, Sequence[str]] = {
    "model": ("path", "dtype", "lora_rank", "lora_alpha", "lora_targets"),
    "backend": (
        "kind",
        "tensor_parallel",
        "expert_parallel",
        "expert_tensor_parallel",
        "pipeline_parallel",
        "virtual_pipeline",
        "context_parallel",
        "distributed_optimizer",
    ),
    "data": ("path", "max_prompt_tokens", "shuffle"),
}


class RunError(MoeReplayError):
    """A folder that a run cannot have."""


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that may not change when a run goes on, by their names; all others may."""
    settings = config.model_dump(mode="json")
    named = {f"{section}.{name}": settings[section][name] for section, names in FIXED.items() for name in names}
    return {"seed": settings["seed"], **named}


class Run:
    """An open run. `begin` comes before the first `log`."""

    def __init__(self, config: TrainConfig, folder: Path, resources: ExitStack) -> None:
        self.folder = folder
        self._config = config
        self._resources = resources
        self._sinks: Sinks | None = None

    @classmethod
    def open(cls, config: TrainConfig) -> Run:
        """Make the folder or find it, lock it, and write the configuration. All ranks call it."""
        resources = ExitStack()
        folder = Path(from_rank_0(lambda: str(_claim(config, resources)), "opening the folder of the run"))
        return cls(config, folder, resources)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def traces(self) -> Path:
        """Folder of the traces that are kept."""
        return self.folder / "traces"

    def begin(self, after: int) -> None:
        """Take metrics from step `after` + 1 on; those of later steps, from before a restart, are cut."""
        from_rank_0(lambda: self._open_sinks(after), "opening the metrics of the run")

    def _open_sinks(self, after: int) -> str:
        log = self._config.log
        self._sinks = Sinks(log.enabled_sinks, SinkContext(self.folder, self._config.name, after, log.project))
        self._resources.callback(self._sinks.close)
        return ""

    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of one step, to every sink; other ranks than the first may call it in vain."""
        if rank() != 0:
            return
        if self._sinks is None:
            raise RunError("metrics before the run has begun", remedy="Call begin(after=step of the checkpoint or 0)")
        self._sinks.log(step, metrics)

    def close(self) -> None:
        """Close the sinks and give the folder free."""
        self._resources.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


# ---- what the first rank does ---------------------------------------------------------------------------------------


def _claim(config: TrainConfig, resources: ExitStack) -> Path:
    from moe_replay.train.config.file import to_toml

    for name in config.log.enabled_sinks:
        load_sink(name)
    try:
        folder = _folder(config)
        resources.enter_context(_locked(folder))
        _check_may_go_on(folder, config.resume)
        # with the folder in it, so that training from this file goes on with this run
        write_whole(folder / "config.toml", to_toml(config.model_copy(update={"output": folder})))
        _log_to(folder / "log.txt", resources)
    except OSError as error:
        resources.close()
        raise RunError(f"the folder of the run cannot be written: {error}", remedy="Give another `output`") from error
    except RunError:
        resources.close()
        raise
    return folder


def _folder(config: TrainConfig) -> Path:
    """The folder that was asked for, or a new one; absolute, so that a change of directory does not matter."""
    if config.output is not None:
        folder = config.output.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{config.name}"
    number = 1
    while True:
        folder = (RUNS / (stem if number == 1 else f"{stem}-{number}")).absolute()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1  # another run began in the same second
        else:
            return folder


def _locked(folder: Path) -> IO[str]:
    """A file that is locked while it is open; the lock goes with the process, however that ends."""
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise RunError(
            f"another run writes to {folder}", found=owner or None, remedy="Wait for it, or give another `output`"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _check_may_go_on(folder: Path, resume: bool) -> None:
    checkpoints = folder / "checkpoints"
    used = (folder / "metrics.jsonl").exists() or (checkpoints.is_dir() and any(checkpoints.glob("step-*")))
    if used and not resume:
        raise RunError(
            f"there is a run in {folder} already",
            expected="an empty folder, as resume = false",
            remedy="Set resume = true to go on with it, or give another `output`",
        )


def _log_to(path: Path, resources: ExitStack) -> None:
    """Everything that the library logs from now on goes to this file too."""
    logger = logging.getLogger("moe_replay")
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    resources.callback(handler.close)
    resources.callback(logger.removeHandler, handler)
    resources.callback(logger.setLevel, level)
