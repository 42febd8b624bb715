"""metrics.jsonl: one JSON object per step, written by every run and read by reports."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.train.sinks.types import Metrics, SinkContext
from moe_replay.utils.files import write_whole
from moe_replay.utils.messages import one_line

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
        """Append a line, which can be read at once."""
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


def _damaged(path: Path, number: int, what: str) -> MetricsError:
    return MetricsError(f"{path}, line {number} {what}", remedy="Delete the line, or move the file away to resume")


def cut_lines(path: Path, after: int) -> None:
    """Remove the steps after `after` from a metrics.jsonl; the file on disk is always the old or the new one."""
    if path.exists():
        kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= after]
        write_whole(path, "".join(kept))


def _as_json(value: float) -> float | None:
    number = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    return number if math.isfinite(number) else None
