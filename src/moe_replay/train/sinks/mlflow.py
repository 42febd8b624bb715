"""MLflow."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from moe_replay.train.sinks.types import Metrics, SinkContext
from moe_replay.utils.files import write_whole

MOST_METRICS = 1000  # of one request, by MLflow's REST API


class Mlflow:
    """A run in MLflow, the same one after a resume; $MLFLOW_TRACKING_URI says where, as everywhere in MLflow."""

    requires: ClassVar = ("mlflow",)

    def __init__(self, context: SinkContext) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        known = context.folder / "mlflow-id.txt"
        if known.exists():
            self._run = known.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(context.project)
        experiment = found.experiment_id if found else self._client.create_experiment(context.project)
        self._run = self._client.create_run(experiment, run_name=context.name).info.run_id
        write_whole(known, self._run)

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of one step."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        values = [Metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        for first in range(0, len(values), MOST_METRICS):
            self._client.log_batch(self._run, metrics=values[first : first + MOST_METRICS])

    def close(self) -> None:
        """Finish the run there."""
        self._client.set_terminated(self._run)
