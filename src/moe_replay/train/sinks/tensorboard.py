"""TensorBoard event files in the folder of a run."""

from __future__ import annotations

from typing import ClassVar

from moe_replay.train.sinks.types import Metrics, SinkContext


class TensorBoard:
    """Event files in `tensorboard/`; TensorBoard hides steps that a resumed run logs again."""

    requires: ClassVar = ("tensorboard",)

    def __init__(self, context: SinkContext) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(context.folder / "tensorboard"), purge_step=context.last_step + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
