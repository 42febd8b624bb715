"""Errors that say what is wrong, where, what was expected, what was found, and what to do about it.

Every class is a `ValueError`, so code that knows nothing of this library still treats bad routes as bad input.
The parts of a message are kept as attributes: a tool can group errors by layer without parsing text.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "AlignmentError",
    "EngineError",
    "EngineName",
    "EngineUnavailableError",
    "LayoutError",
    "MissingExtraError",
    "MoeReplayError",
    "ReplayStateError",
    "TraceError",
    "TraceFormatError",
    "UnsupportedRouterError",
]


class MoeReplayError(ValueError):
    """Base of every error of this library: `problem [where]: expected ..., found .... Remedy.`"""

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
    """A route trace contradicts itself: shapes, ids out of range, an expert twice in one row."""


class TraceFormatError(TraceError):
    """Bytes that are not a trace: truncated, corrupted, of another version, or larger than allowed."""


class LayoutError(MoeReplayError):
    """A token layout that cannot be: lengths, widths or parallel sizes do not fit each other."""


class AlignmentError(MoeReplayError):
    """Routes and model disagree about layers, rows or token ids. Raised before the forward runs."""


class UnsupportedRouterError(MoeReplayError):
    """A router that replay cannot drive, or that nobody has told us how to drive."""


class ReplayStateError(MoeReplayError):
    """Record or replay used out of turn: nested, unconsumed, consumed twice, from a second thread."""


class MissingExtraError(MoeReplayError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class EngineName(NamedTuple):
    """Which engine, in which version: for the texts of errors."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


class EngineError(MoeReplayError):
    """A rollout engine that cannot do what was asked, died, or returned routes that cannot be true."""


class EngineUnavailableError(EngineError):
    """An engine that cannot be reached, is overloaded or does not answer in time: another one may serve the request."""
