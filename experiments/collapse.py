"""Does training collapse without replay, and does replay prevent it? By updates on each rollout.

python -m experiments.collapse --device cuda --together 6 --minutes 9
python -m experiments.collapse --draw
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.drawing import grid, outcome_table
from experiments.results import Result
from experiments.study import Study, main, with_seeds

UPDATES = (1, 4, 16)
MODES = ("off", "r2", "r3")


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    columns = {
        f"reward, {updates} updates a rollout": [run for run in runs if run.arm.updates == updates]
        for updates in UPDATES
    }
    grid(figure, columns, "mismatch/rollout_vs_train/k3_kl", "k3 of rollout and train")


STUDY = Study(
    name="collapse",
    question="Reward and mismatch without replay, with R2 and with R3, by updates on each rollout.",
    arms=with_seeds([Arm(mode=mode, updates=updates) for updates in UPDATES[::-1] for mode in MODES]),
    draw=_draw,
    table=outcome_table,
    size=(9.0, 5.2),
)

if __name__ == "__main__":
    main(STUDY)
