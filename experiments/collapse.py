"""Does training collapse without replay, and does replay prevent it? By updates on each rollout.

python -m experiments.collapse --device cuda --together 6 --minutes 9
python -m experiments.collapse --draw
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.drawing import curves, legend_of_modes, outcome_table
from experiments.results import Result
from experiments.study import Study, main, with_seeds

UPDATES = (1, 4, 16)
MODES = ("off", "r2", "r3")


def _draw(figure: Any, found: Sequence[Result]) -> None:
    grid = figure.subplots(2, len(UPDATES), sharex=True, sharey="row")
    for column, updates in enumerate(UPDATES):
        chosen = [result for result in found if result.arm.updates == updates]
        curves(grid[0, column], chosen, "reward/mean", f"reward, {updates} updates a rollout")
        curves(grid[1, column], chosen, "mismatch/rollout_vs_train/k3_kl", "k3 of rollout and train", log=True)
    legend_of_modes(figure)


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
