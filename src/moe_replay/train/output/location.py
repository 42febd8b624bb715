"""Folder of a run; used by processes that only start ranks too, so it imports no torch."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_replay.train.config.train_config import TrainConfig

RUNS = Path("runs")

FAILURE = "failure.txt"
"""In a run folder: the error that ended the run; absent while it runs and after a run that ended well."""


def run_folder(config: TrainConfig) -> Path:
    """Return `output`, or a new folder; absolute, so that a change of directory does not matter."""
    if config.output is not None:
        folder = config.output.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{config.name}"
    number = 1
    while True:
        folder = (RUNS / (stem if number == 1 else f"{stem}-{number}")).absolute()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1  # another run started in the same second
        else:
            return folder
