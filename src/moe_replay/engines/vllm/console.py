"""Console output of vLLM's processes: startup progress, and no warnings that do not matter here.

This holds for engines that `start` in engine.py starts, unless `VLLM_LOGGING_LEVEL` is set: then vLLM's log is shown as
it is. The processes inherit the setting by environment variables.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moe_replay.utils.misc import one_line

LEVEL = "VLLM_LOGGING_LEVEL"
_PROGRESS_ENV = "MOE_REPLAY_ENGINE_CONSOLE"
_FAILURE_ENV = "MOE_REPLAY_ENGINE_FAILURE"
_MUTED_WARNINGS = {
    "Attempted to load weight": "an update is cast to the dtype of the engine",
    ": Failed to load weights": "tables that no checkpoint has (RotaryEmbedding); updates check for missing weights",
    "Passing raw prompts to InputProcessor is deprecated": "token ids in, token ids out",
    "Using None for EOS token id": "end tokens are among the stop tokens",
    "not present in model, enabling with": "a list that vLLM builds itself",
    "Enforce eager set": "set on purpose",
    "Inductor compilation was disabled by user settings": "set on purpose",
    "does not officially support disabling chunked prefill": "on CPU, where seeds need it",
    "Model Runner V2 requires Triton": "on CPU",
    "libtcmalloc is not found": "on CPU",
    "[shutdown] Process manager: force killing": "the engine was closed",
}
"""Part of a message -> why it does not matter."""


@contextmanager
def engine_console() -> Iterator[None]:
    """Have the processes that vLLM starts in this context print their progress and mute known warnings."""
    if LEVEL in os.environ:
        yield
        return
    os.environ.update({LEVEL: "WARNING", _PROGRESS_ENV: "1"})
    try:
        yield
    finally:
        for name in (LEVEL, _PROGRESS_ENV):
            os.environ.pop(name, None)


def mute_known_warnings() -> None:
    """Mute known warnings in this process's vLLM log if `engine_console` is on; idempotent."""
    factory: Any = logging.getLogRecordFactory()
    if _PROGRESS_ENV in os.environ and not _is_installed(factory):
        logging.setLogRecordFactory(_Demotion(factory))


class _Demotion:
    """Factory of log records that gives vLLM's known warnings the level DEBUG.

    A filter on a handler would be lost when vLLM reconfigures its handlers, which 0.32 does in every process.
    """

    def __init__(self, factory: Callable[..., logging.LogRecord]) -> None:
        self._factory = factory

    def __call__(self, *arguments: Any, **options: Any) -> logging.LogRecord:
        record = self._factory(*arguments, **options)
        set_by_user = LEVEL in os.environ and _PROGRESS_ENV not in os.environ
        if record.levelno == logging.WARNING and record.name.startswith("vllm") and not set_by_user:
            message = record.getMessage()
            if any(part in message for part in _MUTED_WARNINGS):
                record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return record


def _is_installed(factory: Any) -> bool:
    """Whether a factory of log records is ours, or wraps it as vLLM's does."""
    return isinstance(factory, _Demotion) or (hasattr(factory, "_factory") and _is_installed(factory._factory))


def failure_file(folder: Path) -> Path:
    """Return the file to which processes that vLLM starts from now on write why they failed."""
    file = folder / "failure.txt"
    os.environ[_FAILURE_ENV] = str(file)
    return file


def note_failures() -> None:
    """Have errors that vLLM logs in this process written to the file of `failure_file`; idempotent."""
    log, file = logging.getLogger("vllm"), os.environ.get(_FAILURE_ENV)
    if file and not any(isinstance(handler, _FailureNote) for handler in log.handlers):
        log.addHandler(_FailureNote(file))


def noted_failure(file: Path) -> str | None:
    """Return the first error that vLLM logged."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return lines[0] if lines else None


class _FailureNote(logging.Handler):
    """Appends the error of each log record to a file, one per line."""

    def __init__(self, file: str) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with suppress(OSError), open(self._file, "a", encoding="utf-8") as notes:  # its folder may be gone
                notes.write(f"{one_line(error)}\n")


class StartupProgress:
    """Prints the phases of a worker's start. Mixed into a worker of vLLM."""

    vllm_config: Any
    rank: int

    def load_model(self, **options: Any) -> None:
        with self._step("loading weights"):
            super().load_model(**options)  # type: ignore[misc]

    def determine_available_memory(self) -> Any:
        with self._step("compiling and measuring memory"):
            return super().determine_available_memory()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        eager = self.vllm_config.model_config.enforce_eager
        with self._step("warming up" if eager else "compiling and capturing CUDA graphs"):
            return super().compile_or_warm_up_model()  # type: ignore[misc]

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        if _PROGRESS_ENV not in os.environ or self.rank:
            yield
            return
        print(f"vLLM: {name}", file=sys.stderr, flush=True)
        began = time.monotonic()
        yield
        print(f"vLLM: {name}: done in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
