"""`write_comparison`: several runs on one page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moe_replay.report.page import MISSING, Page, Table, format_metric, format_number
from moe_replay.report.plots import RUN_ROLES, Curve, RenderedFigure, curve_figure
from moe_replay.report.record import ReportError, RunRecord, Series, read_run

ENOUGH_STEPS = 20  # per run, to rank them
_STYLES = ("-", "--", ":", "-.")
_PER_RUN = ("output", "name", "resume")  # differ between any two runs


@dataclass(frozen=True, slots=True)
class _Metric:
    """A compared metric; `best` is "max", "min", or empty if neither is better."""

    metric: str
    title: str
    best: str = ""
    log: bool = False
    percent: bool = False
    mark: float | None = None


_METRICS = {
    "Reward": (
        _Metric("reward/mean", "Reward", "max"),
        _Metric("eval/reward", "Evaluation reward", "max"),
    ),
    "Rollout against trainer": (
        _Metric("mismatch/rollout_vs_old/k3_kl", "k3, as trained", "min", log=True),
        _Metric("mismatch/rollout_vs_native/k3_kl", "k3, without replay", "min", log=True),
        _Metric("mismatch/rollout_vs_old/logprob_abs_diff/mean", "|Δ log p|, as trained", "min", log=True),
        _Metric("mismatch/rollout_vs_old/ratio/max", "Largest ratio, as trained", "min", log=True, mark=1.0),
        _Metric("mismatch/rollout_vs_old/frac_ratio_gt2", "F(2), as trained", "min", percent=True),
        _Metric("mismatch/old_vs_train/ratio/mean", "Mean ratio, train / old", mark=1.0),
        _Metric("mismatch/rollout_vs_train/ratio/mean", "Mean ratio, train / rollout", mark=1.0),
        _Metric("mismatch/old_vs_train/k3_kl", "Policy change within a step", log=True),
    ),
    "Routes": (
        _Metric("routing/agreement", "Route agreement", "max", percent=True, mark=1.0),
        _Metric("routing/replayed_fraction", "Routes replayed", percent=True),
        _Metric("routing/load_violation", "Load of the busiest expert", "min"),
    ),
    "Learning": (
        _Metric("loss/total", "Loss"),
        _Metric("loss/grad_norm", "Gradient norm", log=True),
        _Metric("loss/entropy", "Entropy"),
        _Metric("completion/length_mean", "Completion length"),
    ),
    "Time": (
        _Metric("time/step", "Seconds per step", "min"),
        _Metric("time/tokens_per_second", "Tokens per second", "max"),
    ),
}


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write a page that overlays the curves of several runs, and its figures as PNG files in `<stem>-figures`."""
    if len(folders) < 2:
        raise ReportError("nothing to compare", expected="two runs or more", found=len(folders))
    runs = _with_unique_labels([read_run(folder) for folder in folders])
    page = Page(f"Comparison of {len(runs)} runs")
    page.head(" · ".join(run.label for run in runs), _summary(runs))
    colours = [f"var(--{RUN_ROLES[index % len(RUN_ROLES)]})" for index in range(len(runs))]
    head = [run.label for run in runs]
    page.section(
        "Final values",
        [],
        "Mean over the last tenth of the steps, as in run reports; best single step in parentheses.",
        Table(("", *head), list(_last_values(runs)), colours),
    )
    for title, measures in _METRICS.items():
        page.section(title, [figure for measure in measures for figure in _overlay(runs, measure)])
    differences = list(_differences(runs))
    if differences:
        table = Table(("setting", *head), differences, colours, prose=True)
        page.section("Settings that differ", [], table=table)
    return page.write(output, output.with_name(f"{output.stem}-figures"))


def _with_unique_labels(runs: list[RunRecord]) -> list[RunRecord]:
    """Label the runs uniquely, with as many trailing path components as needed."""
    labels = [run.label for run in runs]
    if len(set(labels)) < len(labels):
        paths = [run.folder.resolve().parts for run in runs]
        depths = range(2, max(map(len, paths)) + 1)
        tails = ([str(Path(*parts[-depth:])) for parts in paths] for depth in depths)
        labels = next((tail for tail in tails if len(set(tail)) == len(tail)), labels)
    if len(set(labels)) < len(labels):
        raise ReportError("a run cannot be compared with itself", found=", ".join(labels))
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def _summary(runs: list[RunRecord]) -> Iterator[str]:
    scored = [run for run in runs if len(run["reward/mean"].finite)]
    if len(scored) > 1:
        yield _ranking(scored)
    modes = ", ".join(f"{run.label}: {run.mode or 'unknown'}" for run in runs)
    yield f"Routing replay: {modes}."


def _ranking(runs: list[RunRecord]) -> str:
    """Name the run with the highest final reward, if it has enough steps and the difference exceeds the noise."""
    ranked = sorted(runs, key=lambda run: run["reward/mean"].end, reverse=True)
    rewards = ", ".join(f"{run.label} {format_number(run['reward/mean'].end)}" for run in ranked)
    fewest = min(len(run["reward/mean"].finite) for run in runs)
    if fewest < ENOUGH_STEPS:
        steps = f"{fewest} step{'s' if fewest > 1 else ''}"
        return f"Rewards at the end: {rewards}. A run of {steps} is too short to rank them."
    best, second = (run["reward/mean"] for run in ranked[:2])
    noise = math.hypot(*(_standard_error(series) for series in (best, second)))
    if best.end - second.end <= 2 * noise:
        return f"Rewards at the end: {rewards}. The difference is within the noise of single steps."
    return f"{ranked[0].label} has the highest reward at the end. Rewards at the end: {rewards}."


def _standard_error(series: Series) -> float:
    """Return the standard error of the final mean, from differences of adjacent steps in the second half."""
    late = series.finite[len(series.finite) // 2 :]
    return float(np.std(np.diff(late)) / math.sqrt(2 * series.tenth))


def _overlay(runs: list[RunRecord], measure: _Metric) -> Iterator[RenderedFigure]:
    curves = [
        Curve(
            run[measure.metric],
            _shortened(run.label),
            RUN_ROLES[index % len(RUN_ROLES)],
            _STYLES[index // len(RUN_ROLES) % len(_STYLES)],
        )
        for index, run in enumerate(runs)
    ]
    name = measure.metric.replace("/", "-").replace("_", "-")
    yield from curve_figure(
        name, measure.title, "", curves, log=measure.log, percent=measure.percent, mark=measure.mark
    )


def _last_values(runs: list[RunRecord]) -> Iterator[tuple[str, ...]]:
    yield ("steps", *(str(run.steps) for run in runs))
    for measures in _METRICS.values():
        for measure in measures:
            if any(len(run[measure.metric].finite) for run in runs):
                yield (measure.title, *(_cell(run, measure) for run in runs))


def _cell(run: RunRecord, measure: _Metric) -> str:
    series = run[measure.metric]
    end = format_metric(measure.metric, series.end)
    if not measure.best or not len(series.finite):
        return end
    best = series.finite.max() if measure.best == "max" else series.finite.min()
    return f"{end} ({format_metric(measure.metric, float(best))})"


def _differences(runs: list[RunRecord]) -> Iterator[tuple[str, ...]]:
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _PER_RUN)
    for key in keys:
        values = [json.dumps(run.settings[key], default=str) if key in run.settings else MISSING for run in runs]
        if len(set(values)) > 1:
            yield (key, *values)


def _shortened(label: str) -> str:
    return label if len(label) <= 28 else f"…{label[-27:]}"
