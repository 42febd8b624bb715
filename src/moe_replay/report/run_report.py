"""`write_run_report`: the report page of a run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moe_replay.report import run_figures
from moe_replay.report.attribution_report import add_attribution, read_attribution
from moe_replay.report.completions_report import add_completions
from moe_replay.report.formatting import (
    describe_change,
    explain_level,
    format_metric,
    format_number,
    format_percent,
    is_level,
)
from moe_replay.report.page import Card, Page, Table
from moe_replay.report.record import RunRecord, Series, read_run
from moe_replay.tools.attribution.result import Attribution, AttributionError

LOW_AGREEMENT = 0.8  # matched precisions agree on nine routes in ten; shifted routes agree on few
FEW_STEPS = 10  # fewer say little about a run
MODES = {
    "r3": "R3: routes recorded in the rollout are replayed",
    "r2": "R2: routes recorded in the old-log-prob pass are replayed",
    "off": "no routing replay",
}


def write_run_report(folder: Path) -> Path:
    """Write report.html and figures/*.png into a run folder; return the path of the page."""
    run = read_run(folder)
    page = Page(f"Run {run.label}")
    page.head(_subtitle(run), _summary(run))
    page.cards(_cards(run))
    found, problems = _attribution(folder / "attribution.json")
    texts = Page("")  # shown below, but what cannot be shown is said above
    problems += add_completions(texts, folder)
    page.warnings([*warnings(run), *problems])
    samples = [*run_figures.reward_figures(run), *run_figures.sample_figures(run)]
    page.section("Reward and samples", samples, "Long curves are drawn faint, with their moving average on top.")
    page.section("Rollout against trainer", run_figures.mismatch_figures(run), _about_mismatch(run))
    page.section("Routes", run_figures.route_figures(run))
    page.section("Learning", run_figures.learning_figures(run))
    page.section("Time", run_figures.time_figures(run))
    page.append(texts)
    if found is not None:
        add_attribution(page, found)
    page.heading("Numbers")
    page.details(
        "Every metric: start and end are means over the first and the last tenth of its steps", _all_metrics(run)
    )
    page.details("Settings", Table((), [(key, _text(value)) for key, value in run.settings.items()], prose=True))
    return page.write(folder / "report.html", folder / "figures")


def _attribution(path: Path) -> tuple[Attribution | None, list[str]]:
    """Return the attribution or the reason it cannot be shown; the rest of the report is written either way."""
    if not path.is_file():
        return None, []
    try:
        return read_attribution(path), []
    except AttributionError as error:
        return None, [f"{path.name} is not shown: {error}"]


# ---- summary -------------------------------------------------------------------------------------------------------


def _subtitle(run: RunRecord) -> str:
    model = run.setting("model.path") or "embedded tiny model"
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


def _summary(run: RunRecord) -> Iterator[str]:
    mode = MODES.get(run.mode, "Routing replay: unknown")
    yield f"{mode[0].upper()}{mode[1:]}{f' ({run.reason})' if run.reason else ''}."
    reward = run["reward/mean"]
    if len(reward.finite) == 1:
        yield f"The reward was {format_number(reward.finite[0])}."
    elif len(reward.finite):
        first, final = format_number(reward.start), format_number(reward.end)
        yield f"The reward went from {first} at the start to {final} at the end ({_ends(reward)})."
    yield from _mismatch_summary(run)


def _mismatch_summary(run: RunRecord) -> Iterator[str]:
    scored = run["mismatch/rollout_vs_old/k3_kl"]
    if not len(scored.finite):
        return
    if not run.scored_with_replay:
        numbers = f"{format_number(scored.finite.mean())} per token with native routing"
        yield f"The mean k3 between rollout and trainer was {numbers}; the median over steps was {_median(scored)}."
        return
    without, replayed = k3_native_and_replayed(run)
    if not len(without.values):
        yield (
            f"The mean k3 between rollout and trainer was {format_number(scored.finite.mean())} per token with the "
            f"rollout's routes replayed, the median over steps {_median(scored)}; set replay.compare_every to measure "
            "it without replay too."
        )
        return
    means = float(without.values.mean()), float(replayed.values.mean())
    medians = without.median, replayed.median
    compared = len(without.values)
    yield (
        f"The mean k3 between rollout and trainer was {format_number(means[0])} per token with native routing and "
        f"{format_number(means[1])} with the rollout's routes replayed: {describe_change(*means)}. The medians over "
        f"steps were {format_number(medians[0])} and {format_number(medians[1])}: {describe_change(*medians)}. "
        f"Both were measured in {compared} step{'s' if compared > 1 else ''}"
        + (", too few to generalize from." if compared < FEW_STEPS else ".")
    )


def k3_native_and_replayed(run: RunRecord) -> tuple[Series, Series]:
    """Return k3 without and with replay, each in the steps in which both were measured."""
    replayed, native = (run[f"mismatch/{passes}/k3_kl"] for passes in ("rollout_vs_old", "rollout_vs_native"))
    known = [series.steps[np.isfinite(series.values)] for series in (replayed, native)]
    both = np.intersect1d(known[0], known[1])
    return native.at_steps(both), replayed.at_steps(both)


def _about_mismatch(run: RunRecord) -> str:
    text = "Log-probabilities of the same tokens from the engine that sampled them and from the trainer."
    if not run.scored_with_replay:
        return text
    text += " Blue: with replay. Orange: without."
    without, replayed = k3_native_and_replayed(run)
    level = is_level(without.median, replayed.median)
    return f"{text} {explain_level(run['routing/agreement'].median)}" if level else text


def _median(series: Series) -> str:
    return format_number(series.median)


def _ends(series: Series) -> str:
    """Say what start and end of a series are."""
    return f"means of the first and of the last {series.tenth} steps" if series.tenth > 1 else "single steps"


def _cards(run: RunRecord) -> Iterator[Card]:
    yield Card("steps", str(run.steps))
    yield _card_at_end("reward", run, "reward/mean")
    if len(run["eval/reward"].finite):
        yield _card_at_end("evaluation", run, "eval/reward")
    without, replayed = k3_native_and_replayed(run)
    if run.scored_with_replay and len(without.values):
        for name, series in (("k3 without replay", without), ("k3 with replay", replayed)):
            yield Card(name, format_number(float(series.values.mean())), f"mean; median {_median(series)}")
    else:
        yield _card_at_end("k3", run, "mismatch/rollout_vs_old/k3_kl")
    yield _card_at_end("route agreement", run, "routing/agreement")
    yield _card_at_end("tokens / s", run, "time/tokens_per_second")


def _card_at_end(name: str, run: RunRecord, metric: str) -> Card:
    series = run[metric]
    note = f"end: mean of {series.tenth}" if series.tenth > 1 else "end" if len(series.values) else ""
    return Card(name, format_metric(metric, series.end), note)


# ---- warnings ---------------------------------------------------------------------------------------


def warnings(run: RunRecord) -> Iterator[str]:
    """Yield a sentence for each thing that is or may be wrong with a run."""
    planned = run.settings.get("steps")
    if isinstance(planned, int) and run.steps < planned:
        yield f"The run has stopped, or is still running, after step {run.steps} of {planned}."
    aligned = run["routing/aligned"]
    if (aligned.finite == 0).any():
        where = aligned.steps[aligned.values == 0]
        yield f"Misaligned routes were found in {_in_steps(where)}: run `moe-replay verify`."
    skipped = run["loss/skipped"]
    if (skipped.finite > 0).any():
        yield (
            f"{format_number(skipped.finite.sum())} updates were skipped because their gradient was not finite "
            f"({_in_steps(skipped.steps[skipped.values > 0])})."
        )
    broken = {name: series for name, series in run.metrics.items() if len(series.finite) < len(series.values)}
    if broken:
        where = np.unique(np.concatenate([series.steps[~np.isfinite(series.values)] for series in broken.values()]))
        names = ", ".join([*list(broken)[:5], *(["..."] if len(broken) > 5 else [])])
        yield f"Non-finite values in {_in_steps(where)}: {names}."
    low = {int(found[1]): run[name].end for name in run.metrics if (found := run_figures.LAYER.match(name))}
    low = {layer: value for layer, value in low.items() if value < LOW_AGREEMENT}
    if low:
        worst = min(low, key=low.__getitem__)
        layers = f"{len(low)} layer{'s' if len(low) > 1 else ''}"
        yield (
            f"Route agreement is below {format_percent(LOW_AGREEMENT)} in {layers}; the lowest is layer {worst} with "
            f"{format_percent(low[worst])}. `moe-replay verify` distinguishes noise from misalignment."
        )
    if (unrouted := run["routing/unrouted_fraction"].end) > 0.5:
        yield f"{format_percent(unrouted)} of the tokens had no route to replay."
    if (idle := run["completion/groups_without_signal"].end) > 0.8:
        yield f"At the end, {format_percent(idle)} of the groups had equal rewards and gave no gradient."
    if (cut := run["completion/truncated"].end) > 0.5:
        yield f"At the end, {format_percent(cut)} of the completions were truncated at rollout.max_tokens."
    if (unscored := run["reward/unscored"].end) > 0:
        yield f"At the end, {format_percent(unscored)} of the samples could not be scored."
    if (ess := run["mismatch/rollout_vs_old/ess"].end) < 0.5:
        yield f"The effective sample size was only {format_percent(ess)} of the samples: the policies are far apart."


def _in_steps(steps: np.ndarray) -> str:
    shown = ", ".join(str(step) for step in steps[:5])
    return f"step{'s' if len(steps) > 1 else ''} {shown}{f' and {len(steps) - 5} more' if len(steps) > 5 else ''}"


# ---- tables ---------------------------------------------------------------------------------------------------------


def _all_metrics(run: RunRecord) -> Table:
    rows = []
    for name in sorted(run.metrics):
        series = run[name]
        extremes = (series.finite.min(), series.finite.max()) if len(series.finite) else (math.nan, math.nan)
        numbers = (series.start, series.end, series.median, *map(float, extremes))
        rows.append((name, *(format_metric(name, number) for number in numbers), str(series.steps[-1])))
    return Table(("metric", "start", "end", "median", "lowest", "highest", "last step"), rows)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
