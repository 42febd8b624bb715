"""`write_run_report`: the folder of a run as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe_replay.report import run_figures
from moe_replay.report.attribution_report import add_attribution, read_attribution
from moe_replay.report.formatting import number, percent, times_less
from moe_replay.report.page import Page, Table
from moe_replay.report.record import RunRecord, read_run
from moe_replay.tools.attribution.result import Attribution, AttributionError

LOW_AGREEMENT = 0.8  # engines and trainers of one precision agree on nine routes of ten, and shifted routes on few
_MODES = {
    "r3": "R3: the routes of the rollout are replayed",
    "r2": "R2: the routes of the trainer's first pass are replayed",
    "off": "no routing replay",
}


def write_run_report(folder: Path) -> Path:
    """Write report.html and figures/*.png into the folder of a run; the path of the page."""
    run = read_run(folder)
    page = Page(f"Run {run.label}")
    page.head(_what_it_was(run), _what_came_of_it(run))
    page.cards(_cards(run))
    found, problems = _attribution(folder / "attribution.json")
    page.warnings([*warnings(run), *problems])
    samples = [*run_figures.reward_figures(run), *run_figures.sample_figures(run)]
    page.section("Reward and samples", samples, "A curve of many steps is faint, with its moving average over it.")
    page.section("Rollout against trainer", run_figures.mismatch_figures(run), _about_mismatch(run))
    page.section("Routes", run_figures.route_figures(run))
    page.section("Learning", run_figures.learning_figures(run))
    page.section("Time", run_figures.time_figures(run))
    if found is not None:
        add_attribution(page, found)
    page.headline("Numbers")
    page.details("Last value of every metric", _last_values(run))
    page.details("Settings", Table((), [(key, _text(value)) for key, value in run.settings.items()], prose=True))
    return page.write(folder / "report.html", folder / "figures")


def _attribution(path: Path) -> tuple[Attribution | None, list[str]]:
    """What lies there, or why it cannot be shown: the rest of the report is worth having."""
    if not path.is_file():
        return None, []
    try:
        return read_attribution(path), []
    except AttributionError as error:
        return None, [f"{path.name} is not shown: {error}"]


# ---- the head -------------------------------------------------------------------------------------------------------


def _what_it_was(run: RunRecord) -> str:
    model = run.setting("model.path") or "the library's own tiny model"
    backend = f"{run.setting('backend.kind')} in {run.setting('model.dtype')}"
    engine = f"{run.setting('rollout.engine')} ({run.setting('rollout.dtype')})"
    return f"{model} · trained by {backend} · sampled by {engine} · {_steps(run)}"


def _steps(run: RunRecord) -> str:
    planned = run.settings.get("steps")
    return (
        f"step {run.steps} of {planned}"
        if planned not in (None, run.steps)
        else f"{run.steps} step{'s' if run.steps != 1 else ''}"
    )


def _what_came_of_it(run: RunRecord) -> Iterator[str]:
    mode = _MODES.get(run.mode, "routing replay: unknown")
    yield f"{mode}{f' ({run.reason})' if run.reason else ''}."
    reward = run["reward/mean"]
    if len(reward.finite) == 1:
        yield f"The reward was {number(reward.finite[0])}."
    elif len(reward.finite):
        yield f"The reward went from {number(reward.finite[0])} in the first step to {number(reward.last)} at the end."
    yield from _mismatch_words(run)


def _mismatch_words(run: RunRecord) -> Iterator[str]:
    scored = run["mismatch/rollout_vs_old/k3_kl"]
    if not len(scored.finite):
        return
    if not run.scored_with_replay:
        away = number(scored.finite.mean())
        yield f"With its own routes, the trainer's policy was {away} away from the rollout's (k3, a token)."
        return
    without, replayed = _compared(run)
    if not math.isfinite(without):
        yield (
            f"With the rollout's routes replayed, the trainer's policy was {number(scored.finite.mean())} away from "
            "the rollout's (k3, a token); replay.compare_every would show what it is without."
        )
        return
    yield (
        f"With its own routes, the trainer's policy was {number(without)} away from the rollout's (k3, a token); "
        f"with the rollout's routes replayed, {number(replayed)}: {times_less(without, replayed)}."
    )


def _compared(run: RunRecord) -> tuple[float, float]:
    """k3 without and with replay, each the mean over the steps in which both were measured."""
    replayed, native = (run[f"mismatch/{passes}/k3_kl"] for passes in ("rollout_vs_old", "rollout_vs_native"))
    known = [series.steps[np.isfinite(series.values)] for series in (replayed, native)]
    both = np.intersect1d(known[0], known[1])
    means = [float(series.among(both).values.mean()) if len(both) else math.nan for series in (native, replayed)]
    return means[0], means[1]


def _about_mismatch(run: RunRecord) -> str:
    text = "The same tokens, their log-probabilities from the engine that sampled them and from the trainer."
    return text + (" With replay: blue. Without: orange." if run.scored_with_replay else "")


def _cards(run: RunRecord) -> Iterator[tuple[str, str]]:
    yield "steps", str(run.steps)
    yield "reward", number(run["reward/mean"].last)
    if len(run["eval/reward"].finite):
        yield "evaluation", number(run["eval/reward"].finite[-1])
    without, replayed = _compared(run)
    if run.scored_with_replay and math.isfinite(without):
        yield "k3 without replay", number(without)
        yield "k3 with replay", number(replayed)
    else:
        yield "k3", number(run["mismatch/rollout_vs_old/k3_kl"].last)
    yield "routes that agree", percent(run["routing/agreement"].last)
    yield "tokens / s", number(run["time/tokens_per_second"].last)


# ---- what should be looked at ---------------------------------------------------------------------------------------


def warnings(run: RunRecord) -> Iterator[str]:
    """What is wrong with a run, or may be."""
    planned = run.settings.get("steps")
    if isinstance(planned, int) and run.steps < planned:
        yield f"The run ended, or is still, after step {run.steps} of {planned}."
    aligned = run["routing/aligned"]
    if (aligned.finite == 0).any():
        where = aligned.steps[aligned.values == 0]
        yield f"Routes were found misaligned in {_in_steps(where)}: run `moe-replay verify`."
    skipped = run["loss/skipped"]
    if (skipped.finite > 0).any():
        yield (
            f"{number(skipped.finite.sum())} updates were skipped, since their gradient was not finite "
            f"({_in_steps(skipped.steps[skipped.values > 0])})."
        )
    broken = {name: series for name, series in run.metrics.items() if len(series.finite) < len(series.values)}
    if broken:
        where = np.unique(np.concatenate([series.steps[~np.isfinite(series.values)] for series in broken.values()]))
        names = ", ".join([*list(broken)[:5], *(["..."] if len(broken) > 5 else [])])
        yield f"Not a finite number in {_in_steps(where)}: {names}."
    low = {int(found[1]): run[name].last for name in run.metrics if (found := run_figures.LAYER.match(name))}
    low = {layer: value for layer, value in low.items() if value < LOW_AGREEMENT}
    if low:
        worst = min(low, key=low.__getitem__)
        yield (
            f"{len(low)} layer{'s' if len(low) > 1 else ''} agree on fewer than {percent(LOW_AGREEMENT)} of routes; "
            f"the lowest is layer {worst} with {percent(low[worst])}. `moe-replay verify` tells noise from "
            "misalignment."
        )
    if (unrouted := run["routing/unrouted_fraction"].last) > 0.5:
        yield f"{percent(unrouted)} of the tokens had no route to replay."
    if (idle := run["completion/groups_without_signal"].last) > 0.8:
        yield f"In {percent(idle)} of the groups all rewards were the same at the end: they teach nothing."
    if (cut := run["completion/truncated"].last) > 0.5:
        yield f"{percent(cut)} of the completions were cut off at rollout.max_tokens at the end."
    if (unscored := run["reward/unscored"].last) > 0:
        yield f"{percent(unscored)} of the samples could not be scored at the end."
    if (ess := run["mismatch/rollout_vs_old/ess"].last) < 0.5:
        yield f"The samples were worth only {percent(ess)} of their number (ESS): the two policies are far apart."


def _in_steps(steps: np.ndarray) -> str:
    shown = ", ".join(str(step) for step in steps[:5])
    return f"step{'s' if len(steps) > 1 else ''} {shown}{f' and {len(steps) - 5} more' if len(steps) > 5 else ''}"


# ---- tables ---------------------------------------------------------------------------------------------------------


def _last_values(run: RunRecord) -> Table:
    rows = []
    for name in sorted(run.metrics):
        series = run[name]
        extremes = (series.finite.min(), series.finite.max()) if len(series.finite) else (math.nan, math.nan)
        rows.append((name, number(float(series.values[-1])), *map(number, extremes), str(series.steps[-1])))
    return Table(("metric", "last", "lowest", "highest", "at step"), rows)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
