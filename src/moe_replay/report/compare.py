"""`write_comparison`: several runs on one page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_replay.report.colours import OF_RUNS
from moe_replay.report.drawing import Picture
from moe_replay.report.formatting import UNKNOWN, number
from moe_replay.report.page import Page, Table
from moe_replay.report.plots import Curve
from moe_replay.report.record import ReportError, RunRecord, read_run
from moe_replay.report.run_figures import curve_figure

_STYLES = ("-", "--", ":", "-.")
_OWN = ("output", "name", "resume")  # differ between any two runs


@dataclass(frozen=True, slots=True)
class _Measure:
    """A metric that runs are compared by; `best` picks its best value, where one is better than another."""

    metric: str
    title: str
    best: str = ""
    log: bool = False
    share: bool = False


_MEASURES = {
    "Reward": (
        _Measure("reward/mean", "Reward", "max"),
        _Measure("eval/reward", "Reward in evaluation", "max"),
    ),
    "Rollout against trainer": (
        _Measure("mismatch/rollout_vs_old/k3_kl", "k3, as trained", "min", log=True),
        _Measure("mismatch/rollout_vs_native/k3_kl", "k3, without replay", "min", log=True),
        _Measure("mismatch/rollout_vs_old/logprob_abs_diff/mean", "|Δ log p|, as trained", "min", log=True),
        _Measure("mismatch/rollout_vs_old/ratio/max", "Largest ratio, as trained", "min", log=True),
        _Measure("mismatch/rollout_vs_old/beyond_two", "F(2), as trained", "min", share=True),
        _Measure("mismatch/old_vs_train/k3_kl", "Policy change within a step", log=True),
    ),
    "Routes": (
        _Measure("routing/agreement", "Agreement of routes", "max", share=True),
        _Measure("routing/replayed_fraction", "Routes replayed", share=True),
        _Measure("routing/load_violation", "Load of the busiest expert", "min"),
    ),
    "Learning": (
        _Measure("loss/total", "Loss"),
        _Measure("loss/grad_norm", "Gradient norm", log=True),
        _Measure("loss/entropy", "Entropy"),
        _Measure("completion/length_mean", "Length of completions"),
    ),
    "Time": (
        _Measure("time/step", "Seconds of a step", "min"),
        _Measure("time/tokens_per_second", "Tokens per second", "max"),
    ),
}


def write_comparison(folders: Sequence[Path], output: Path) -> Path:
    """Write a page with the curves of several runs over each other; figures as PNG files in a folder named like it."""
    if len(folders) < 2:
        raise ReportError("nothing to compare", expected="two runs or more", found=len(folders))
    runs = _told_apart([read_run(folder) for folder in folders])
    page = Page(f"{len(runs)} runs side by side")
    page.head(" · ".join(run.label for run in runs), _in_words(runs))
    colours = [f"var(--{OF_RUNS[place % len(OF_RUNS)]})" for place in range(len(runs))]
    head = [run.label for run in runs]
    page.section(
        "At the end",
        [],
        "Mean over the last tenth of the steps; in brackets the best single step.",
        Table(("", *head), list(_last_values(runs)), colours),
    )
    for title, measures in _MEASURES.items():
        page.section(title, [picture for measure in measures for picture in _overlaid(runs, measure)])
    differences = list(_differences(runs))
    if differences:
        table = Table(("setting", *head), differences, colours, prose=True)
        page.section("Settings that differ", [], table=table)
    return page.write(output, output.with_name(f"{output.stem}-figures"))


def _told_apart(runs: list[RunRecord]) -> list[RunRecord]:
    """The runs with labels that differ: as much of the end of their paths as is needed."""
    labels = [run.label for run in runs]
    if len(set(labels)) < len(labels):
        paths = [run.folder.resolve().parts for run in runs]
        depths = range(2, max(map(len, paths)) + 1)
        tails = ([str(Path(*parts[-depth:])) for parts in paths] for depth in depths)
        labels = next((tail for tail in tails if len(set(tail)) == len(tail)), labels)
    if len(set(labels)) < len(labels):
        raise ReportError("a run cannot be compared with itself", found=", ".join(labels))
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def _in_words(runs: list[RunRecord]) -> Iterator[str]:
    rewards = {run.label: run["reward/mean"].last for run in runs if len(run["reward/mean"].finite)}
    if len(rewards) > 1:
        best = max(rewards, key=rewards.__getitem__)
        yield f"The highest reward at the end is that of {best}: {number(rewards[best])}."
    modes = ", ".join(f"{run.label}: {run.mode or 'unknown'}" for run in runs)
    yield f"Routing replay: {modes}."


def _overlaid(runs: list[RunRecord], measure: _Measure) -> Iterator[Picture]:
    curves = [
        Curve(
            run[measure.metric],
            _shortened(run.label),
            OF_RUNS[place % len(OF_RUNS)],
            _STYLES[place // len(OF_RUNS) % len(_STYLES)],
        )
        for place, run in enumerate(runs)
    ]
    name = measure.metric.replace("/", "-").replace("_", "-")
    yield from curve_figure(name, measure.title, "", curves, log=measure.log, share=measure.share)


def _last_values(runs: list[RunRecord]) -> Iterator[tuple[str, ...]]:
    yield ("steps", *(str(run.steps) for run in runs))
    for measures in _MEASURES.values():
        for measure in measures:
            if any(len(run[measure.metric].finite) for run in runs):
                yield (measure.title, *(_cell(run, measure) for run in runs))


def _cell(run: RunRecord, measure: _Measure) -> str:
    series = run[measure.metric]
    if not measure.best or not len(series.finite):
        return number(series.last)
    best = series.finite.max() if measure.best == "max" else series.finite.min()
    return f"{number(series.last)} ({number(float(best))})"


def _differences(runs: list[RunRecord]) -> Iterator[tuple[str, ...]]:
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _OWN)
    for key in keys:
        told = [json.dumps(run.settings[key], default=str) if key in run.settings else UNKNOWN for run in runs]
        if len(set(told)) > 1:
            yield (key, *told)


def _shortened(label: str) -> str:
    return label if len(label) <= 28 else f"…{label[-27:]}"
