"""Weights & Biases."""

from __future__ import annotations

import secrets
from typing import Any, ClassVar

from moe_replay.train.sinks.types import Metrics, SinkContext
from moe_replay.utils.files import write_whole


class WeightsAndBiases:
    """A run in Weights & Biases, the same one after a resume; $WANDB_MODE=offline keeps it on disk."""

    requires: ClassVar = ("wandb",)

    def __init__(self, context: SinkContext) -> None:
        import wandb

        known = context.folder / "wandb-id.txt"
        if not known.exists():
            write_whole(known, secrets.token_hex(8))
        self._run: Any = wandb.init(
            project=context.project,
            name=context.name,
            dir=str(context.folder),
            id=known.read_text().strip(),
            resume="allow",
        )
        # Its own step counter cannot go back to the step of a checkpoint; a metric of ours can.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of one step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()
