"""Replay beside other remedies and other causes: importance sampling, stale samples, truncated sampling.

python -m experiments.remedies --device cuda --together 6 --minutes 9
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.arms import Arm
from experiments.drawing import curves, legend_of_modes, outcome_table
from experiments.results import Result
from experiments.study import Study, main, with_seeds

CASES: dict[str, dict[str, Any]] = {
    "truncated importance sampling": {"updates": 16, "correction": "token_truncate"},
    "samples up to 4 steps old": {"staleness": 4},
    "top-p 0.95, mask replayed": {"top_p": 0.95},
    "top-p 0.95, no mask": {"top_p": 0.95, "mask": False},
}


def _draw(figure: Any, found: Sequence[Result]) -> None:
    grid = figure.subplots(2, len(CASES), sharex=True, sharey="row")
    for column, (label, case) in enumerate(CASES.items()):
        chosen = [one for one in found if all(getattr(one.arm, key) == value for key, value in case.items())]
        if "mask" not in case:
            chosen = [one for one in chosen if one.arm.mask]
        curves(grid[0, column], chosen, "reward/mean", label)
        curves(grid[1, column], chosen, "mismatch/rollout_vs_train/k3_kl", "k3 of rollout and train", log=True)
    legend_of_modes(figure)


STUDY = Study(
    name="remedies",
    question="Replay beside importance sampling, with stale samples, and with truncated sampling.",
    arms=with_seeds([Arm(mode=mode, **case) for case in CASES.values() for mode in ("off", "r3")]),
    draw=_draw,
    table=outcome_table,
    size=(11.0, 5.2),
)

if __name__ == "__main__":
    main(STUDY)
