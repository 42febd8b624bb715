"""How does the precision of the rollout change the mismatch? FP8, bfloat16, and float32 on both sides as the floor.

python -m experiments.precision --device cuda --together 6 --minutes 9
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.drawing import grid, outcome_table
from experiments.results import Result
from experiments.study import Study, main, with_seeds

MODES = ("off", "r3")
KINDS = {"FP8 rollout": "fp8", "bfloat16 rollout": "bf16", "float32 on both sides": "fp32"}


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    columns = {
        f"reward, {label}": [run for run in runs if run.arm.rollout == precision] for label, precision in KINDS.items()
    }
    grid(figure, columns, "mismatch/rollout_vs_old/k3_kl", "k3 of rollout and old")


STUDY = Study(
    name="precision",
    question="Mismatch by the precision of the rollout.",
    arms=with_seeds(
        [
            *(Arm(mode=mode, updates=16, rollout="fp8") for mode in MODES),
            *(Arm(mode=mode, updates=16) for mode in MODES),
            *(Arm(mode=mode, updates=16, rollout="fp32", trainer="fp32") for mode in MODES),
        ]
    ),
    draw=_draw,
    table=outcome_table,
    size=(9.0, 5.2),
)

if __name__ == "__main__":
    main(STUDY)
