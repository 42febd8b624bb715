"""The interface of metric sinks, and what they know about their run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The run whose metrics a sink receives.

    folder      of the run; a sink writes its files there, under its own names
    name        of the run
    last_step   last completed step: 0 in a new run; what a resumed run had logged for later steps is obsolete
    project     `log.project`
    """

    folder: Path
    name: str = "run"
    last_step: int = 0
    project: str = "moe-replay"


class Sink(Protocol):
    """A destination of metrics. It is opened, written to and closed on rank 0 only."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one completed step; NaN and infinities are possible values."""

    def close(self) -> None:
        """Write what is still buffered and release all resources; also called when a run fails."""


OpenSink = Callable[[SinkContext], Sink]
"""Opens a sink, e.g. its class. An attribute `requires` names packages that are looked for before a run starts."""
