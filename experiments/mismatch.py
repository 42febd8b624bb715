"""How far are rollout and trainer apart, and how much of it does replay remove? From the runs of the other studies.

python -m experiments.mismatch --draw
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.arms import Arm
from experiments.drawing import COLOURS, LABELS, legend_of_modes
from experiments.results import Result, spread
from experiments.study import Study, main, with_seeds

MODES = ("off", "r2", "r3")
CASES: dict[str, dict[str, Any]] = {
    "bfloat16, 1 update": {"updates": 1},
    "bfloat16, 4 updates": {},
    "bfloat16, 16 updates, lr 1e-5": {"updates": 16, "lr": 1e-5},
    "bfloat16, 16 updates": {"updates": 16},
    "bfloat16, 16 updates, lr 1e-4": {"updates": 16, "lr": 1e-4},
    "FP8, 16 updates": {"updates": 16, "rollout": "fp8"},
    "float32 on both sides, 16 updates": {"updates": 16, "rollout": "fp32", "trainer": "fp32"},
    "top-p 0.95, mask replayed": {"top_p": 0.95},
    "top-p 0.95, no mask": {"top_p": 0.95, "mask": False},
}
MEASURES = {
    "k3": "mismatch/{}/k3_kl",
    "mean difference of log-probs": "mismatch/{}/logprob_abs_diff/mean",
    "F(2)": "mismatch/{}/frac_ratio_gt2",
}


def mean_over_steps(result: Result, measure: str, pair: str = "rollout_vs_old") -> float:
    """Return a measure of the mismatch, as a mean over those steps of a run that have it."""
    values = result.metrics.get(MEASURES[measure].format(pair), np.array([np.nan]))
    return float("nan") if np.isnan(values).all() else float(np.nanmean(values))


def _of(runs: Sequence[Result], mode: str, case: dict[str, Any]) -> list[Result]:
    return [run for run in runs if run.arm == Arm(mode=mode, seed=run.arm.seed, **case)]


def _draw(figure: Any, runs: Sequence[Result]) -> None:
    panels = {"k3": "k3 of rollout and old log-probs", "F(2)": "tokens off by more than a factor of 2"}
    row = figure.subplots(1, len(panels), sharey=True)
    for axes, (measure, title) in zip(row, panels.items(), strict=True):
        for position, case in enumerate(CASES.values()):
            for mode in MODES:
                values = [mean_over_steps(run, measure) for run in _of(runs, mode, case)]
                axes.plot(values, [position] * len(values), "o", color=COLOURS[mode], label=LABELS[mode], markersize=7)
        axes.set_xscale("log")
        axes.set_title(title, fontsize=9)
        axes.set_yticks(range(len(CASES)), list(CASES), fontsize=8)
        axes.grid(axis="x", alpha=0.3)
    row[0].invert_yaxis()
    legend_of_modes(figure)


def _table(runs: Sequence[Result]) -> list[list[str]]:
    native = ("k3", "F(2)")
    rows = [["", "mode", *MEASURES, *(f"{name} of the same samples without replay" for name in native)]]
    for label, case in CASES.items():
        for mode in MODES:
            group = _of(runs, mode, case)
            if group:
                measured = [spread([mean_over_steps(run, name) for run in group]) for name in MEASURES]
                pair = "rollout_vs_native"
                without = [spread([mean_over_steps(run, name, pair) for run in group]) for name in native]
                rows.append([label, LABELS[mode], *measured, *without])
    return rows


STUDY = Study(
    name="mismatch",
    question="Log-probs of rollout and trainer on the same weights, with and without replay.",
    arms=with_seeds([Arm(mode=mode, **case) for case in CASES.values() for mode in MODES]),
    draw=_draw,
    table=_table,
    size=(9.0, 4.0),
)

if __name__ == "__main__":
    main(STUDY)
