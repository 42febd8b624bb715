"""Where the metrics of a run go: a file of JSON lines always, TensorBoard and Weights & Biases where asked for."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.utils.files import write_whole

if TYPE_CHECKING:
    from moe_replay.train.config.sections import LogConfig

Metrics = Mapping[str, float]


class MetricsError(MoeReplayError):
    """A file of metrics that cannot be read."""


class Sink(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of one step."""

    def close(self) -> None:
        """Everything is written."""


def check_sinks(log: LogConfig) -> None:
    """Raise if a sink needs a package that is not installed."""
    if log.tensorboard:
        _require("tensorboard")
    if log.wandb:
        _require("wandb")


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise MissingExtraError(
            f"log.{package} needs the package {package}", remedy=f"pip install 'moe-replay[{package}]'"
        )


def open_sinks(log: LogConfig, folder: Path, name: str, after: int) -> list[Sink]:
    """All sinks of a run whose next step is `after` + 1; what later steps left there before is cut."""
    sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl", after)]
    if log.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", after))
    if log.wandb:
        sinks.append(WeightsAndBiases(folder, log.project, name))
    return sinks


class JsonLines:
    """One JSON object a line, one line a step: {"step": 1, "time": unix seconds, ...}. NaN and infinities are null.

    after   lines of later steps are cut when the file is opened
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        cut_lines(path, after)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of one step."""
        line = {"step": step, "time": time.time(), **{name: _as_json(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        """Everything is written."""
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path, after: int = 0) -> None:
        _require("tensorboard")
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of one step."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Everything is written."""
        self._writer.close()


class WeightsAndBiases:
    """A run in Weights & Biases, the same one when training goes on; $WANDB_MODE=offline keeps it on disk."""

    def __init__(self, folder: Path, project: str, name: str) -> None:
        _require("wandb")
        import wandb

        known = folder / "wandb-id.txt"
        if not known.exists():
            write_whole(known, secrets.token_hex(8))
        self._run: Any = wandb.init(
            project=project, name=name, dir=str(folder), id=known.read_text().strip(), resume="allow"
        )
        # Its own count cannot go back to the step of a checkpoint; a metric of ours can.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of one step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Everything is written."""
        self._run.finish()


# ---- the file -------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every step of a metrics.jsonl; a last line that was cut off when a run was killed is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not line.endswith("\n"):
                return
            raise MetricsError(f"{path}, line {number} is no JSON: {error}") from error


def cut_lines(path: Path, after: int) -> None:
    """Leave the steps up to `after` in a metrics.jsonl; what lies there is the old file or the new one."""
    if path.exists():
        kept = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= after]
        write_whole(path, "".join(kept))


def _as_json(value: float) -> float | None:
    number = value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    return number if math.isfinite(number) else None
