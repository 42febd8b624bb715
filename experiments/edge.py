"""Where does plain GRPO live on the edge? Learning rates by mode; other studies use what it finds.

python -m experiments.edge --device cuda --together 6 --minutes 9
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.drawing import curves, legend_of_modes, outcome_table
from experiments.results import Result
from experiments.study import Study, main

RATES = (1e-5, 3e-5, 1e-4)
MODES = ("off", "r2", "r3")


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    row = figure.subplots(1, len(RATES), sharey=True)
    for axes, rate in zip(row, RATES, strict=True):
        curves(axes, [run for run in runs if run.arm.lr == rate], "reward/mean", f"reward, learning rate {rate:g}")
    legend_of_modes(figure)


STUDY = Study(
    name="edge",
    question="At which learning rate does training without replay degrade?",
    arms=tuple(Arm(mode=mode, updates=16, lr=rate) for rate in RATES for mode in MODES),
    draw=_draw,
    table=outcome_table,
)

if __name__ == "__main__":
    main(STUDY)
