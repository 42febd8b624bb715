"""The larger model: 32 MoE layers, completions of 1,000 tokens and more, with and without replay.

python -m experiments.model --device cuda --large --minutes 9       # pre-training; again, until it is done
python -m experiments.large --device cuda --together 2 --minutes 9
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.drawing import grid, outcome_table
from experiments.results import FOLDER, Result
from experiments.scales import LARGE_SCALES
from experiments.study import Study, main, with_seeds

CASES: dict[str, dict[str, Any]] = {"fresh": {}, "samples up to 4 steps old": {"staleness": 4}}


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    columns = {
        label: [run for run in runs if run.arm == Arm(mode=run.arm.mode, seed=run.arm.seed, **case)]
        for label, case in CASES.items()
    }
    grid(figure, columns, "mismatch/rollout_vs_old/k3_kl", "k3 of rollout and old")


STUDY = Study(
    name="large",
    question="32 MoE layers and completions of 1,000 tokens: mismatch and training, with and without replay.",
    arms=tuple(
        arm for case in CASES.values() for arm in with_seeds([Arm(mode=mode, **case) for mode in ("off", "r3")])
    ),
    draw=_draw,
    table=outcome_table,
    size=(9.0, 5.2),
    scales=LARGE_SCALES,
    folder=FOLDER / "large",
)

if __name__ == "__main__":
    main(STUDY)
