"""How does the precision of the rollout change the mismatch? FP8, bfloat16, and float32 on both sides as the floor.

python -m experiments.precision --device cuda --together 6 --minutes 9
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.drawing import curves, legend_of_modes, outcome_table
from experiments.results import Result
from experiments.study import Study, main, with_seeds

KINDS = {"FP8 rollout": "fp8", "bfloat16 rollout": "bf16", "float32 on both sides": "fp32"}


def _draw(figure: Any, found: Sequence[Result]) -> None:
    grid = figure.subplots(2, len(KINDS), sharex=True, sharey="row")
    for column, (label, precision) in enumerate(KINDS.items()):
        chosen = [result for result in found if result.arm.rollout == precision]
        curves(grid[0, column], chosen, "reward/mean", f"reward, {label}")
        curves(grid[1, column], chosen, "mismatch/rollout_vs_old/k3_kl", "k3 of rollout and old", log=True)
    legend_of_modes(figure)


STUDY = Study(
    name="precision",
    question="Mismatch by the precision of the rollout.",
    arms=with_seeds(
        [
            *(Arm(mode=mode, rollout="fp8") for mode in ("off", "r3")),
            *(Arm(mode=mode) for mode in ("off", "r3")),
            *(Arm(mode=mode, rollout="fp32", trainer="fp32") for mode in ("off", "r3")),
        ]
    ),
    draw=_draw,
    table=outcome_table,
    size=(9.0, 5.2),
)

if __name__ == "__main__":
    main(STUDY)
