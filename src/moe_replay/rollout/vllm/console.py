"""What vLLM's processes show on the console: the progress of a start, and no warnings that mean nothing here.

Both hold for engines that `rollout.vllm.start` starts, unless `VLLM_LOGGING_LEVEL` is set: then all of vLLM's log of
that level is shown. The processes get this by environment variables, which they inherit.
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

from moe_replay.utils.messages import one_line

LEVEL = "VLLM_LOGGING_LEVEL"
_TOLD = "MOE_REPLAY_ENGINE_CONSOLE"
_FAILURE = "MOE_REPLAY_ENGINE_FAILURE"
_MEAN_NOTHING = {
    "Attempted to load weight": "an update is cast to the dtype of the engine",
    ": Failed to load weights": "tables that no checkpoint has (RotaryEmbedding); an update that lacks weights fails",
    "Passing raw prompts to InputProcessor is deprecated": "token ids in, token ids out",
    "Using None for EOS token id": "end tokens are among the stop tokens",
    "not present in model, enabling with": "of a list that vLLM makes itself",
    "Enforce eager set": "it was asked for",
    "Inductor compilation was disabled by user settings": "it was asked for",
    "does not officially support disabling chunked prefill": "on CPU, where seeds need it",
    "Model Runner V2 requires Triton": "on CPU",
    "libtcmalloc is not found": "on CPU",
    "[shutdown] Process manager: force killing": "an engine that is closed",
}
"""Parts of messages -> why they do not matter."""


@contextmanager
def engine_console() -> Iterator[None]:
    """Have the processes that vLLM starts in this context tell their progress, and leave out what means nothing."""
    if LEVEL in os.environ:
        yield
        return
    os.environ.update({LEVEL: "WARNING", _TOLD: "1"})
    try:
        yield
    finally:
        for name in (LEVEL, _TOLD):
            os.environ.pop(name, None)


def leave_out_what_means_nothing() -> None:
    """Leave warnings of vLLM out of the log of this process, if `engine_console` says so; again changes nothing."""
    factory: Any = logging.getLogRecordFactory()
    if _TOLD in os.environ and not _is_installed(factory):
        logging.setLogRecordFactory(_Demotion(factory))


class _Demotion:
    """Makes log records; those of vLLM that mean nothing have the level of debugging, which is not shown.

    A filter of a handler would be gone when vLLM configures its handlers again, which 0.32 does in every process.
    """

    def __init__(self, factory: Callable[..., logging.LogRecord]) -> None:
        self._factory = factory

    def __call__(self, *arguments: Any, **options: Any) -> logging.LogRecord:
        record = self._factory(*arguments, **options)
        asked_for = LEVEL in os.environ and _TOLD not in os.environ
        if record.levelno == logging.WARNING and record.name.startswith("vllm") and not asked_for:
            message = record.getMessage()
            if any(known in message for known in _MEAN_NOTHING):
                record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return record


def _is_installed(factory: Any) -> bool:
    """Whether a factory of log records is ours, or wraps it as vLLM's does."""
    return isinstance(factory, _Demotion) or (hasattr(factory, "_factory") and _is_installed(factory._factory))


def failure_file(folder: Path) -> Path:
    """Return the file in which processes that vLLM starts from now on note why they failed."""
    file = folder / "failure.txt"
    os.environ[_FAILURE] = str(file)
    return file


def note_failures() -> None:
    """Have errors that vLLM logs in this process noted in the file of `failure_file`; again changes nothing."""
    log, file = logging.getLogger("vllm"), os.environ.get(_FAILURE)
    if file and not any(isinstance(handler, _FailureNote) for handler in log.handlers):
        log.addHandler(_FailureNote(file))


def noted_failure(file: Path) -> str | None:
    """Return what vLLM has named first as the cause of a failure."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return lines[0] if lines else None


class _FailureNote(logging.Handler):
    """Appends the error of a log record to a file, a line each."""

    def __init__(self, file: str) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            with suppress(OSError), open(self._file, "a", encoding="utf-8") as notes:  # of an engine that is gone
                notes.write(f"{one_line(error)}\n")


class ToldStart:
    """Tells on the console what a worker of vLLM does while it starts. Mixed into a worker of vLLM."""

    vllm_config: Any
    rank: int

    def load_model(self, **options: Any) -> None:
        """Load the weights."""
        with self._told("loading weights"):
            super().load_model(**options)  # type: ignore[misc]

    def determine_available_memory(self) -> Any:
        """Measure what is left for the KV cache."""
        with self._told("compiling, and measuring memory"):
            return super().determine_available_memory()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Compile what is left, and capture CUDA graphs."""
        eager = self.vllm_config.model_config.enforce_eager
        with self._told("warming up" if eager else "compiling, and capturing CUDA graphs"):
            return super().compile_or_warm_up_model()  # type: ignore[misc]

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        if _TOLD not in os.environ or self.rank:
            yield
            return
        print(f"vLLM: {what}", file=sys.stderr, flush=True)
        began = time.monotonic()
        yield
        print(f"vLLM: {what}: done in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
