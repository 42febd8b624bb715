"""Shared by the figures of all studies: colours of modes, curves with their spread, table rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.arms import Arm
from experiments.results import Result, spread
from experiments.study import same_but_seed
from moe_replay.report.plots import integer_ticks

COLOURS = {"off": "#b3403a", "r2": "#c58a1b", "r3": "#22668c"}
LABELS = {"off": "no replay", "r2": "R2", "r3": "R3"}
OUTCOMES = {
    "reward at the end": "reward/mean",
    "held-out accuracy": "eval/reward",
    "k3, rollout and old": "mismatch/rollout_vs_old/k3_kl",
    "F(2), rollout and train": "mismatch/rollout_vs_train/frac_ratio_gt2",
    "route agreement": "routing/agreement",
    "gradient norm": "loss/grad_norm",
    "entropy": "loss/entropy",
}


def curves(axes: Any, runs: Sequence[Result], key: str, title: str, *, log: bool = False) -> None:
    """Draw the median over seeds of a metric, and their range; modes by colour."""
    for arm, group in same_but_seed(runs).items():
        steps = max(result.steps for result in group)
        values = np.full((len(group), steps), np.nan)
        for row, result in enumerate(group):
            values[row, : result.steps] = result.smoothed(key)
        if np.isnan(values).all():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # steps in which no seed has a value
            middle, low, high = np.nanmedian(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)
        positions = np.arange(1, steps + 1)
        has_value = ~np.isnan(middle)
        axes.plot(positions[has_value], middle[has_value], color=COLOURS[arm.mode], label=LABELS[arm.mode])
        if len(group) > 1:
            axes.fill_between(
                positions[has_value], low[has_value], high[has_value], color=COLOURS[arm.mode], alpha=0.2, linewidth=0
            )
    if log:
        axes.set_yscale("log")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step")
    integer_ticks(axes.xaxis)


def grid(figure: Any, columns: Mapping[str, Sequence[Result]], key: str, title: str) -> None:
    """Draw the reward of each column that has results, and below it a mismatch of log-probs."""
    columns = {label: runs for label, runs in columns.items() if runs}
    axes = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    for position, (label, runs) in enumerate(columns.items()):
        curves(axes[0, position], runs, "reward/mean", label)
        curves(axes[1, position], runs, key, title, log=True)
    legend_of_modes(figure)


def legend_of_modes(figure: Any) -> None:
    """Name the colours of the modes that are drawn anywhere in the figure, below it."""
    shown = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def outcome_table(runs: Sequence[Result], columns: dict[str, str] | None = None) -> list[list[str]]:
    """Return a row for each arm: runs, when they collapsed, and metrics at the end with the spread of the seeds."""
    columns = columns or OUTCOMES
    rows = [["arm", "runs", "collapsed at step", *columns]]
    for arm, group in same_but_seed(runs).items():
        collapses = [result.collapsed_at() for result in group]
        text = ", ".join("-" if step is None else str(step) for step in collapses)
        values = [spread([result.at_end(key) for result in group]) for key in columns.values()]
        rows.append([described(arm), str(len(group)), text, *values])
    return rows


def described(arm: Arm) -> str:
    """Return the name of an arm without its seed."""
    return arm.name.rpartition("-seed_")[0]
