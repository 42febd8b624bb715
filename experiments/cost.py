"""What does replay cost end to end? Seconds of each part of a step, and tokens a second, in runs of `collapse`.

python -m experiments.cost --draw
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.collapse import STUDY as COLLAPSE
from experiments.drawing import COLOURS, LABELS, outcome_table
from experiments.results import Result
from experiments.study import Study, main, same_but_seed

PARTS = ("rollout", "score", "train", "sync")
SEED = 1
"""Times of runs that share a GPU in different ways cannot be compared: those with this seed shared it in one way."""


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    axes = figure.subplots()
    groups = same_but_seed(runs)
    for position, (arm, group) in enumerate(groups.items()):
        below = 0.0
        for part, alpha in zip(PARTS, (0.4, 0.6, 0.8, 1.0), strict=True):
            height = float(np.median([np.nanmedian(run.metrics[f"time/{part}"]) for run in group]))
            axes.bar(
                position, height, bottom=below, color=COLOURS[arm.mode], alpha=alpha, label=part if not position else ""
            )
            below += height
    names = [f"{LABELS[arm.mode]}\n{arm.updates} updates" for arm in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=7)
    axes.set_ylabel("seconds a step, median")
    axes.legend(frameon=False, fontsize=8)


def _table(runs: Sequence[Result]) -> list[list[str]]:
    columns = {part: f"time/{part}" for part in PARTS} | {"tokens/s": "time/tokens_per_second"}
    return outcome_table(runs, columns)


STUDY = Study(
    name="cost",
    question="Seconds of each part of a step.",
    arms=tuple(arm for arm in COLLAPSE.arms if arm.seed == SEED),
    draw=_draw,
    table=_table,
)

if __name__ == "__main__":
    main(STUDY)
