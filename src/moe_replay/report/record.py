"""`RunRecord`: settings and metrics of a run folder."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_replay.errors import MoeReplayError
from moe_replay.train.output.location import FAILURE
from moe_replay.train.output.sinks import read_lines


class ReportError(MoeReplayError):
    """A folder or file without the data for a report."""


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """A metric over the steps it was logged in: steps (N,), values (N,) with NaN where it was not finite."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        return self.values[np.isfinite(self.values)]

    @property
    def tenth(self) -> int:
        """Number of values averaged at the start and at the end, since single steps are noisy."""
        return math.ceil(len(self.values) / 10)

    @property
    def start(self) -> float:
        """Mean over the first tenth of the values; NaN if none is finite."""
        return _mean(self.values[: self.tenth])

    @property
    def end(self) -> float:
        """Mean over the last tenth of the values, which is "end" in all reports; NaN if none is finite."""
        return _mean(self.values[len(self.values) - self.tenth :])

    @property
    def median(self) -> float:
        """Median of all finite values; NaN if there is none."""
        return float(np.median(self.finite)) if len(self.finite) else math.nan

    def at_steps(self, steps: np.ndarray) -> Series:
        mask = np.isin(self.steps, steps)
        return Series(self.steps[mask], self.values[mask])


EMPTY = Series(np.zeros(0, np.int64), np.zeros(0))


@dataclass(frozen=True, slots=True, eq=False)
class RunRecord:
    """A run as read from its folder."""

    folder: Path
    label: str  # display name
    settings: dict[str, Any]  # "section.key" -> value from config.toml; empty if there is none
    mode: str  # off, r2 or r3; "" if unknown
    reason: str  # why this mode was chosen
    metrics: dict[str, Series]  # name -> series
    failure: str = ""  # the error that ended the run; "" if none did

    def __getitem__(self, name: str) -> Series:
        return self.metrics.get(name, EMPTY)

    def setting(self, key: str, default: str = "unknown") -> str:
        return str(self.settings.get(key, default))

    @property
    def steps(self) -> int:
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def scored_with_replay(self) -> bool:
        """Whether the old log-probs come from a pass that replays the rollout's routes."""
        return self.mode == "r3"


def read_run(folder: Path) -> RunRecord:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ReportError(f"{folder} is not a run folder", expected="a metrics.jsonl in it", found="none")
    metrics = collect_series(read_lines(path))
    failure = folder / FAILURE
    error = failure.read_text(encoding="utf-8").strip() if failure.is_file() else ""
    if not metrics:
        raise ReportError(f"the run in {folder} has not finished a step yet{error and f'; it failed: {error}'}")
    settings = _settings(folder / "config.toml")
    mode, reason = _replay_plan(folder / "config.toml", settings)
    return RunRecord(folder, folder.resolve().name, settings, mode, reason, metrics, error)


def collect_series(lines: Iterable[dict[str, Any]]) -> dict[str, Series]:
    """Return name -> series from the lines of a metrics.jsonl; null becomes NaN."""
    by_name: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            if name not in ("step", "time", "version") and (value is None or isinstance(value, (int, float))):
                by_name.setdefault(name, {})[int(line["step"])] = _finite(value)
    return {
        name: Series(np.array(sorted(values)), np.array([values[step] for step in sorted(values)]))
        for name, values in by_name.items()
    }


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _finite(value: float | None) -> float:
    return float(value) if value is not None and math.isfinite(value) else math.nan


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not text
        raise ReportError(f"{path} is not valid TOML: {error}") from error
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= (
            {f"{name}.{key}": setting for key, setting in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def _replay_plan(path: Path, settings: dict[str, Any]) -> tuple[str, str]:
    """Return (mode, reason), with `auto` resolved as in training; both empty where that cannot be done."""
    try:
        from moe_replay.train.config.file import load_config
        from moe_replay.train.learn.replay_mode import plan_replay

        plan = plan_replay(load_config(path))
    except (ImportError, MoeReplayError):  # no training extras on this machine, or a file of another release
        mode = str(settings.get("replay.mode", ""))
        return (mode, "as configured") if mode in ("off", "r2", "r3") else ("", "")
    return plan.mode, plan.reason
