"""The run folder: its lock, its contents, and the metric sinks.

    runs/20260131-120000-name/
      config.toml      every setting, defaults included
      metrics.jsonl    one JSON object per step
      failure.txt      the error that ended the run, if one did
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
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from moe_replay.distributed.ranks import from_rank_0, rank
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.train.output.completions import remove_completions, require_pyarrow
from moe_replay.train.output.location import FAILURE, RUNS, run_folder
from moe_replay.train.output.sinks import Metrics, SinkContext, Sinks, load_sink
from moe_replay.utils.files import write_whole
from moe_replay.utils.misc import one_line

if TYPE_CHECKING:
    from moe_replay.train.config.train_config import TrainConfig


class RunError(MoeReplayError):
    """A folder that a run cannot use."""


class RunWriteError(RunError):
    """A file of a run that could not be written, e.g. because the disk is full."""

    exit_status = ExitStatus.FAILED


class Run:
    """An open run. Call `begin` before the first `log`."""

    def __init__(self, config: TrainConfig, folder: Path, resources: ExitStack) -> None:
        self.folder = folder
        self._config = config
        self._resources = resources
        self._sinks: Sinks | None = None

    @classmethod
    def open(cls, config: TrainConfig) -> Run:
        """Create or find the folder, lock it, and write the configuration. Collective."""
        with ExitStack() as resources:
            folder = Path(from_rank_0(lambda: str(_claim(config, resources)), "opening the run folder"))
            return cls(config, folder, resources.pop_all())

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def traces(self) -> Path:
        return self.folder / "traces"

    def update(self, config: TrainConfig) -> None:
        """Rewrite the configuration with values resolved since the run was opened. Collective."""
        self._config = config
        from_rank_0(lambda: _write_config(config, self.folder), "writing the configuration")

    def begin(self, after: int) -> None:
        """Open the metric sinks for step `after` + 1; metrics logged for later steps before a resume are removed."""
        from_rank_0(lambda: self._open_sinks(after), "opening the metric sinks")

    def _open_sinks(self, after: int) -> None:
        remove_completions(self.folder, after)
        log = self._config.log
        self._sinks = Sinks(log.enabled_sinks, SinkContext(self.folder, self._config.name, after, log.project))
        self._resources.callback(self._sinks.close)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of one step to every sink; does nothing on ranks other than 0."""
        if rank() != 0:
            return
        if self._sinks is None:
            raise RunError("metrics were logged before begin()", remedy="Call begin(after=step of the checkpoint or 0)")
        self._sinks.log(step, metrics)

    def close(self) -> None:
        self._resources.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception) and rank() == 0:
            with suppress(OSError):  # the disk may be full, and the error itself is on its way to the console
                write_whole(self.folder / FAILURE, one_line(error, 2000) + "\n")
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
        (folder / FAILURE).unlink(missing_ok=True)
        _log_to(folder / "log.txt", resources)
    except OSError as error:
        raise RunError(f"the run folder cannot be written: {error}", remedy="Choose another `output`") from error
    return folder


def check_run_folder(config: TrainConfig) -> None:
    """Raise if the run could not use its folder; nothing is created."""
    if config.log.completions:
        require_pyarrow()
    folder = RUNS if config.output is None else config.output
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        obstacle = "read-only" if existing.is_dir() else "not a folder"
        raise RunError(
            f"the run folder {folder} cannot be written: {existing} is {obstacle}", remedy="Choose another `output`"
        )
    if config.output is None:
        return
    _check_resumable(folder, config.resume)
    if (folder / ".lock").is_file():
        _locked(folder).close()


def _write_config(config: TrainConfig, folder: Path) -> None:
    """Write config.toml with the folder in it, so that training from this file resumes this run."""
    from moe_replay.train.config.file import to_toml

    write_whole(folder / "config.toml", to_toml(config.model_copy(update={"output": folder})))


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
    """A log file that is not essential: a write failure is reported once."""

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
