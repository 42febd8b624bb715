"""Errors that state the problem, where it is, what was expected, what was found, and the remedy.

Every class is a `ValueError`, so that code unaware of this library treats bad routes as bad input. The parts of a
message are kept as attributes: a tool can group errors by layer without parsing text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

__all__ = [
    "AlignmentError",
    "EngineAnswerError",
    "EngineError",
    "EngineName",
    "EngineOptionError",
    "EngineUnavailableError",
    "LayoutError",
    "MissingExtraError",
    "MoeReplayError",
    "ReplayStateError",
    "TraceError",
    "TraceFormatError",
    "UnsupportedRouterError",
]


class ExitStatus(IntEnum):
    """Exit status of a command.

    OK            done
    CHECK_FAILED  the answer is no: routes misaligned, a threshold exceeded, a layout that does not fit, divergence
    WRONG_INPUT   something must be corrected: an option, a recipe, a file, a row of the data
    FAILED        an engine, a reward, an environment, a library or the machine failed, or a package is missing
    INTERRUPTED   stopped by a signal with everything saved: start the same command again (EX_TEMPFAIL of sysexits.h)
    """

    OK = 0
    CHECK_FAILED = 1
    WRONG_INPUT = 2
    FAILED = 3
    INTERRUPTED = 75


EXIT_CODES = """\
exit status:
  0    done
  1    a check failed: routes misaligned, threshold exceeded, layout that does not fit, training diverged
  2    wrong option, recipe, file or row of the data
  3    an engine, a reward, an environment or the machine failed, or a package is missing
  75   interrupted and saved: start the same command again to resume
"""


class MoeReplayError(ValueError):
    """Base of every error of this library: `problem [where]: expected ..., found .... Remedy.`

    exit_status          of a command that ends with it (`ExitStatus`)
    known_on_all_ranks   raised on every rank of the job, so that one of them reports it
    """

    exit_status: int = ExitStatus.WRONG_INPUT
    known_on_all_ranks: bool = False

    def __init__(
        self,
        problem: str,
        *,
        sample: int | str | None = None,
        layer: int | str | None = None,
        token: int | str | None = None,
        expected: object = None,
        found: object = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.sample = sample
        self.layer = layer
        self.token = token
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(self._text())

    @property
    def facts(self) -> dict[str, Any]:
        """All but the problem, as arguments: for an error of another class about the same."""
        return {name: getattr(self, name) for name in ("sample", "layer", "token", "expected", "found", "remedy")}

    def _text(self) -> str:
        places = (("sample", self.sample), ("layer", self.layer), ("token", self.token))
        where = ", ".join(f"{name} {value}" for name, value in places if value is not None)
        facts = ", ".join(
            f"{name} {value}"
            for name, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        )
        text = self.problem + (f" [{where}]" if where else "") + (f": {facts}" if facts else "")
        return text + (f". {self.remedy}" if self.remedy else "")


class TraceError(MoeReplayError):
    """An inconsistent route trace: wrong shapes, ids out of range, an expert twice in one row."""


class TraceFormatError(TraceError):
    """Bytes that are not a trace: truncated, corrupted, of another version, or larger than allowed."""


class LayoutError(MoeReplayError):
    """An inconsistent token layout: lengths, widths or parallel sizes do not match."""


class AlignmentError(MoeReplayError):
    """Routes and model disagree about layers, rows or token ids. Raised before the forward runs."""

    exit_status = ExitStatus.CHECK_FAILED


class UnsupportedRouterError(MoeReplayError):
    """A router that cannot be replayed, or that is unknown and not described."""


class ReplayStateError(MoeReplayError):
    """Record or replay used out of order: nested, unused, used twice, from a second thread."""

    exit_status = ExitStatus.CHECK_FAILED


class MissingExtraError(MoeReplayError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""

    exit_status = ExitStatus.FAILED


@contextmanager
def needs_extra(need: str, extra: str) -> Iterator[None]:
    """Name the extra that installs a package whose import fails inside this context.

    need   what cannot be done without it: "figures need matplotlib"; {}: the name of the package
    """
    try:
        yield
    except MissingExtraError:  # of something inside, which names its own extra
        raise
    except ImportError as missing:
        raise MissingExtraError(need.format(missing.name), remedy=f"pip install 'moe-replay[{extra}]'") from missing


class EngineName(NamedTuple):
    """Name and version of an engine, for error messages."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class EngineError(MoeReplayError):
    """A rollout engine that does not support a request, died, or returned impossible routes."""

    exit_status = ExitStatus.FAILED


class EngineOptionError(EngineError):
    """An option that a rollout engine does not have, or a value that it does not take."""

    exit_status = ExitStatus.WRONG_INPUT


class EngineAnswerError(EngineError):
    """An answer of a server that cannot be used: another server may serve the request."""


class EngineUnavailableError(EngineError):
    """An engine that is unreachable, overloaded or too slow to answer: another one may serve the request."""
