"""The folder of a run: which process may write to it, what it contains, and where its metrics go.

    runs/20260131-120000-name/
      config.toml      every setting, defaults included
      metrics.jsonl    one JSON object per step
      log.txt          what the library logs
      checkpoints/     see checkpoint.py
      traces/          routes of some samples, where log.traces asks for them
      completions/     texts with rewards and advantages, where log.completions asks for them; see completions.py
      report.html

All ranks open it and get the same folder; rank 0 writes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from moe_replay.distributed.ranks import from_rank_0, rank
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.train.run.completions import remove_completions, require_pyarrow
from moe_replay.train.run.location import run_folder
from moe_replay.train.sinks.registry import Sinks, load_sink
from moe_replay.train.sinks.types import Metrics, SinkContext
from moe_replay.utils.files import write_whole

if TYPE_CHECKING:
    from moe_replay.train.config.train_config import TrainConfig

# A checkpoint holds a position in the data and tensors of the model: these settings identify the data and the model.
FIXED: dict[str, Sequence[str]] = {
    "model": ("path", "dtype", "lora_rank", "lora_alpha", "lora_targets"),
    "backend": ("kind",),
    "data": ("path", "max_prompt_tokens", "shuffle"),
}


class RunError(MoeReplayError):
    """A folder that a run cannot use."""


class RunWriteError(RunError):
    """A file of a run that could not be written, e.g. because the disk is full."""

    exit_status = ExitStatus.FAILED


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must not change when a run resumes, by name; all others may."""
    settings = config.model_dump(mode="json")
    named = {f"{section}.{name}": settings[section][name] for section, names in FIXED.items() for name in names}
    return {"seed": settings["seed"], **named}


class Run:
    """An open run. Call `begin` before the first `log`."""

    def __init__(self, config: TrainConfig, folder: Path, resources: ExitStack) -> None:
        self.folder = folder
        self._config = config
        self._resources = resources
        self._sinks: Sinks | None = None

    @classmethod
    def open(cls, config: TrainConfig) -> Run:
        """Create or find the folder, lock it, and write the configuration. All ranks call it."""
        resources = ExitStack()
        folder = Path(from_rank_0(lambda: str(_claim(config, resources)), "opening the run folder"))
        return cls(config, folder, resources)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def traces(self) -> Path:
        """Folder of the saved traces."""
        return self.folder / "traces"

    def update(self, config: TrainConfig) -> None:
        """Write the configuration again, with what has been found out since the run was opened. All ranks call it."""
        self._config = config
        from_rank_0(lambda: _write_config(config, self.folder), "writing the configuration")

    def begin(self, after: int) -> None:
        """Open the metric sinks for step `after` + 1; what a run before its resume logged of later steps is removed."""
        from_rank_0(lambda: self._open_sinks(after), "opening the metric sinks")

    def _open_sinks(self, after: int) -> str:
        remove_completions(self.folder, after)
        log = self._config.log
        self._sinks = Sinks(log.enabled_sinks, SinkContext(self.folder, self._config.name, after, log.project))
        self._resources.callback(self._sinks.close)
        return ""

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step to every sink; does nothing on ranks other than 0."""
        if rank() != 0:
            return
        if self._sinks is None:
            raise RunError("metrics were logged before begin()", remedy="Call begin(after=step of the checkpoint or 0)")
        self._sinks.log(step, metrics)

    def close(self) -> None:
        """Close the sinks and release the folder."""
        self._resources.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


# ---- on rank 0 ---------------------------------------------------------------------------------------------------


def _claim(config: TrainConfig, resources: ExitStack) -> Path:
    if config.log.completions:
        require_pyarrow()
    for name in config.log.enabled_sinks:
        load_sink(name)
    try:
        folder = run_folder(config)
        resources.enter_context(_locked(folder))
        _check_resumable(folder, config.resume)
        _write_config(config, folder)
        _log_to(folder / "log.txt", resources)
    except OSError as error:
        resources.close()
        raise RunError(f"the run folder cannot be written: {error}", remedy="Choose another `output`") from error
    except RunError:
        resources.close()
        raise
    return folder


def _write_config(config: TrainConfig, folder: Path) -> str:
    """Write config.toml with the folder in it, so that training from this file resumes this run."""
    from moe_replay.train.config.file import to_toml

    write_whole(folder / "config.toml", to_toml(config.model_copy(update={"output": folder})))
    return ""


def _locked(folder: Path) -> IO[str]:
    """Open a file that stays locked while it is open; the lock ends with the process, however it ends."""
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().strip()
        file.close()
        raise RunError(
            f"another run is writing to {folder}", found=owner or None, remedy="Wait for it, or choose another `output`"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _check_resumable(folder: Path, resume: bool) -> None:
    checkpoints = folder / "checkpoints"
    used = (folder / "metrics.jsonl").exists() or (checkpoints.is_dir() and any(checkpoints.glob("step-*")))
    if used and not resume:
        raise RunError(
            f"{folder} already contains a run",
            expected="an empty folder, because resume = false",
            remedy="Set resume = true to resume it, or choose another `output`",
        )


class _LogFile(logging.FileHandler):
    """A log file that a run can do without: if it cannot be written, that is logged once."""

    _is_failing = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name that logging gives it
        error = sys.exc_info()[1]
        if not self._is_failing:
            self._is_failing = True
            print(f"WARNING: {self.baseFilename} cannot be written: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # of what could not be written before
            logging.Handler.close(self)


def _log_to(path: Path, resources: ExitStack) -> None:
    """Also write to this file what the library logs from now on."""
    logger = logging.getLogger("moe_replay")
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    resources.callback(handler.close)
    resources.callback(logger.removeHandler, handler)
    resources.callback(logger.setLevel, level)
