"""Replay combined with other remedies and other causes: importance sampling, stale samples, truncated sampling.

python -m experiments.remedies --device cuda --together 6 --minutes 9
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.drawing import OUTCOMES, grid, outcome_table
from experiments.results import Result
from experiments.study import Study, main, with_seeds

CASES: dict[str, dict[str, Any]] = {
    "truncated importance sampling": {"updates": 16, "correction": "token_truncate"},
    "samples up to 4 steps old": {"staleness": 4},
    "top-p 0.95, mask replayed": {"top_p": 0.95},
    "top-p 0.95, no mask": {"top_p": 0.95, "mask": False},
}


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    columns = {
        label: [run for run in runs if run.arm == Arm(mode=run.arm.mode, seed=run.arm.seed, **case)]
        for label, case in CASES.items()
    }
    grid(figure, columns, "mismatch/rollout_vs_train/k3_kl", "k3 of rollout and train")


def _table(runs: Sequence[Result]) -> list[list[str]]:
    return outcome_table(runs, OUTCOMES | {"mean ratio, rollout and old": "mismatch/rollout_vs_old/ratio/mean"})


STUDY = Study(
    name="remedies",
    question="Replay with importance sampling, with stale samples, and with truncated sampling.",
    arms=with_seeds([Arm(mode=mode, **case) for case in CASES.values() for mode in ("off", "r3")]),
    draw=_draw,
    table=_table,
    size=(11.0, 5.2),
)

if __name__ == "__main__":
    main(STUDY)
