"""Metric sinks: interface, loading by name, and metrics.jsonl, which every run writes and reports read.

class MySink:                                        # log.sinks = ["my_module:MySink"]
    def __init__(self, context: SinkContext): ...
    def log(self, step, metrics): ...
    def close(self): ...
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moe_replay.errors import MoeReplayError
from moe_replay.train.config.registries import SINKS
from moe_replay.utils.files import write_whole
from moe_replay.utils.misc import one_line
from moe_replay.utils.plugins import check_required, resolve, user_code

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The run of a sink.

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
    """A destination of metrics, used on rank 0 only."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of one completed step; NaN and infinities are possible values."""

    def close(self) -> None:
        """Flush and release all resources; also called when a run fails."""


OpenSink = Callable[[SinkContext], Sink]
"""Opens a sink, e.g. its class. An attribute `requires` names packages that are looked for before a run starts."""


FILE = "metrics.jsonl"


class MetricsError(MoeReplayError):
    """A file of metrics that cannot be read."""


class JsonLines:
    """One JSON object per line, one line per step: {"step": 1, "time": unix seconds, ...}; NaN and infinities are null.

    Lines of steps after `context.last_step` are removed when the file is opened.
    """

    def __init__(self, context: SinkContext) -> None:
        path = context.folder / FILE
        cut_lines(path, context.last_step)
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._has_failed = False

    def log(self, step: int, metrics: Metrics) -> None:
        """Append a line, flushed immediately."""
        line = {"step": step, "time": time.time(), **{name: _as_json(value) for name, value in metrics.items()}}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError:
            self._has_failed = True
            raise

    def close(self) -> None:
        """Close the file; what could not be written before is not reported again."""
        try:
            self._file.close()
        except OSError:
            if not self._has_failed:
                raise


# ---- the file -------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every step of a metrics.jsonl; a last line that was cut short when a run was killed is skipped."""
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)
        except (ValueError, RecursionError) as error:  # neither JSON nor UTF-8, or nested too deeply
            if number == len(lines) and not line.endswith(b"\n"):
                return
            raise _damaged(path, number, f"is not JSON: {one_line(error)}") from error
        if not isinstance(step, dict) or not isinstance(step.get("step"), int):
            raise _damaged(path, number, "is not the metrics of a step")
        yield step


def _damaged(path: Path, number: int, problem: str) -> MetricsError:
    return MetricsError(f"{path}, line {number} {problem}", remedy="Delete the line, or move the file away to resume")


def cut_lines(path: Path, after: int) -> None:
    """Remove the steps after `after` from a metrics.jsonl; the file on disk is always the old or the new one."""
    if path.exists():
        lines = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= after]
        write_whole(path, "".join(lines))


def _as_json(value: float) -> float | None:
    number = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    return number if math.isfinite(number) else None


class SinkError(MoeReplayError):
    """A metric sink that raised."""


def load_sink(name: str) -> OpenSink:
    """Return the opener of the sink `name`; raise if a required package is not installed."""
    sink: OpenSink = resolve(name, SINKS, kind="metric sink", key="log.sinks")
    is_built_in = name in SINKS
    check_required(sink, f"log.{name}" if is_built_in else f"log.sinks: {name}", name if is_built_in else "")
    return sink


class Sinks:
    """All sinks of a run, opened in order; an error that one of them raises names it."""

    def __init__(self, names: Iterable[str], context: SinkContext) -> None:
        openers = {name: load_sink(name) for name in names}
        self._sinks: dict[str, Sink] = {}
        with ExitStack() as opened:
            for name, opener in openers.items():
                with user_code(f"metric sink {name!r}", SinkError):
                    sink = self._sinks[name] = opener(context)
                    opened.callback(sink.close)
            self._opened = opened.pop_all()

    def log(self, step: int, metrics: Metrics) -> None:
        for name, sink in self._sinks.items():
            with user_code(f"metric sink {name!r}", SinkError, found=f"metrics of step {step}"):
                sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink, the last opened first."""
        self._opened.close()
