"""Metric sinks of experiment trackers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any, ClassVar

from moe_replay.train.output.sinks import Metrics, SinkContext
from moe_replay.utils.files import write_whole


class TensorBoard:
    """Event files in `tensorboard/`; TensorBoard hides steps that a resumed run logs again."""

    requires: ClassVar = ("tensorboard",)

    def __init__(self, context: SinkContext) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(context.folder / "tensorboard"), purge_step=context.last_step + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _kept(file: Path, new: str) -> str:
    """Return what a file of the run folder has since the run was new."""
    if not file.exists():
        write_whole(file, new)
    return file.read_text().strip()


class WeightsAndBiases:
    """A run in Weights & Biases, the same one after a resume; $WANDB_MODE=offline keeps it on disk."""

    requires: ClassVar = ("wandb",)

    def __init__(self, context: SinkContext) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=context.project,
            name=context.name,
            dir=str(context.folder),
            id=_kept(context.folder / "wandb-id.txt", secrets.token_hex(8)),
            resume="allow",
        )
        # Its own step counter cannot go back to the step of a checkpoint; a metric of ours can.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in Trackio, a local dashboard (`trackio show`), in $TRACKIO_DIR; a resume continues it."""

    requires: ClassVar = ("trackio",)

    def __init__(self, context: SinkContext) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=context.project,
            name=_kept(context.folder / "trackio-name.txt", f"{context.name}-{secrets.token_hex(4)}"),  # unique there
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is still in memory."""
        self._run.finish()


MOST_METRICS = 1000  # of one request, by MLflow's REST API


class Mlflow:
    """A run in MLflow, at $MLFLOW_TRACKING_URI; a resume continues it."""

    requires: ClassVar = ("mlflow",)

    def __init__(self, context: SinkContext) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        id_file = context.folder / "mlflow-id.txt"
        if id_file.exists():
            self._run = id_file.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        existing = self._client.get_experiment_by_name(context.project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(context.project)
        self._run = self._client.create_run(experiment, run_name=context.name).info.run_id
        write_whole(id_file, self._run)

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        values = [Metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        for first in range(0, len(values), MOST_METRICS):
            self._client.log_batch(self._run, metrics=values[first : first + MOST_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run)
