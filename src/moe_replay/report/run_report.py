"""`write_run_report`: the report page of a run folder, and its page of completions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moe_replay.engines.base import REFUSALS
from moe_replay.errors import MissingExtraError
from moe_replay.report.attribution_report import add_attribution, read_attribution
from moe_replay.report.page import (
    Card,
    Page,
    Table,
    TextSample,
    describe_change,
    explain_level,
    format_metric,
    format_number,
    format_percent,
    is_level,
)
from moe_replay.report.plots import (
    Curve,
    RenderedFigure,
    Role,
    curve_figure,
    downsample,
    plot_band,
    plot_heatmap,
    plot_stack,
    render,
    with_data,
)
from moe_replay.report.record import RunRecord, Series, read_run
from moe_replay.train.output.completions import (
    Completion,
    CompletionsError,
    best_and_worst,
    completion_steps,
    printable,
    read_completions,
)
from moe_replay.verification.attribution import Attribution, AttributionError

LOW_AGREEMENT = 0.8  # equal precisions agree on 90 % of routes, shifted routes on few
UNDEFINED_IN_SHORT_STEPS = ("routing/aligned",)  # null: too few tokens for a verdict
FEW_STEPS = 10  # too few to generalize from
MODES = {
    "r3": "R3: routes recorded in the rollout are replayed",
    "r2": "R2: routes recorded in the old-log-prob pass are replayed",
    "off": "no routing replay",
}
COMPLETIONS_PAGE = "completions.html"
COMPLETIONS_IN_REPORT = 4
STEPS_ON_PAGE, SAMPLES_PER_STEP = 16, 16
MAX_CHARACTERS = 2000  # of a prompt or completion
MISMATCH_FIGURES = (
    (
        "k3_kl",
        "k3",
        "KL between rollout and trainer (k3)",
        "k3 estimate of the KL divergence between the policy that sampled the tokens and the trainer's, per token. "
        "0: both are the same policy.",
    ),
    (
        "logprob_abs_diff/mean",
        "|Δ log p|",
        "Log-probability difference",
        "Mean absolute difference between rollout and trainer, over sampled tokens.",
    ),
    (
        "ratio/max",
        "largest ratio",
        "Largest probability ratio",
        "Largest ratio of trainer to rollout probability over all sampled tokens. 1: no token became more likely.",
    ),
    (
        "frac_ratio_gt2",
        "fraction of tokens",
        "Tokens off by a factor of two, F(2)",
        "Fraction of tokens that are at least twice as probable under one of the two policies as under the other.",
    ),
)
REFUSED = re.compile(rf"servers/(.+)/refused_({'|'.join(REFUSALS)})$")
EXCLUDED = re.compile(r"servers/(.+)/excluded$")
LAYER = re.compile(r"routing/agreement/layer_(\d+)$")


def write_run_report(folder: Path, reload_s: int = 0) -> Path:
    """Write report.html and figures/*.png into a run folder; return the path of the page.

    reload_s   seconds after which a browser loads the page again; 0: never
    """
    run = read_run(folder)
    page = Page(f"Run {run.label}", reload_s=reload_s)
    problems = list(warnings(run))
    page.head(_subtitle(run), _summary(run), (verdict(run, problems), not problems))
    page.cards(_cards(run))
    attribution, unreadable = _attribution(folder / "attribution.json")
    texts = Page("")  # shown below the figures; its warnings belong on top
    unreadable += add_completions(texts, folder)
    page.warnings([*problems, *unreadable])
    samples = [*reward_figures(run), *sample_figures(run)]
    page.section("Reward and samples", samples, "Long curves are drawn faint, with their moving average on top.")
    page.section("Rollout against trainer", mismatch_figures(run), _about_mismatch(run))
    page.section("Routes", route_figures(run))
    page.section("Learning", learning_figures(run))
    page.section("Time", time_figures(run))
    page.append(texts)
    if attribution is not None:
        add_attribution(page, attribution)
    page.heading("Numbers")
    page.details(
        "All metrics; start and end are means over the first and the last tenth of the steps", _all_metrics(run)
    )
    page.details("Settings", Table((), [(key, _text(value)) for key, value in run.settings.items()], prose=True))
    return page.write(folder / "report.html", folder / "figures")


def _attribution(path: Path) -> tuple[Attribution | None, list[str]]:
    """Return the attribution, or a warning if it cannot be shown; the rest of the report is written anyway."""
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
    return f"{model} · trained with {backend} · sampled with {engine} · {_steps(run)}"


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
            f"rollout's routes replayed, the median over steps {_median(scored)}; set replay.score_native_every to "
            "also measure it without replay."
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
    """Return k3 without and with replay, in the steps with both."""
    replayed, native = (run[f"mismatch/{passes}/k3_kl"] for passes in ("rollout_vs_old", "rollout_vs_native"))
    measured = [series.steps[np.isfinite(series.values)] for series in (replayed, native)]
    both = np.intersect1d(measured[0], measured[1])
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
    """Describe the start and end values of a series."""
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
    """Yield a sentence for each actual or possible problem of a run, the most serious first."""
    if run.failure:
        yield f"The run failed after step {run.steps}: {run.failure}"
    aligned = run["routing/aligned"]
    if (aligned.finite == 0).any():
        where = aligned.steps[aligned.values == 0]
        yield f"Misaligned routes were found in {_in_steps(where)}: run `moe-replay verify`."
    skipped = run["loss/skipped"]
    if (skipped.finite > 0).any():
        count = skipped.finite.sum()
        were_skipped = "updates were skipped because their" if count > 1 else "update was skipped because its"
        yield (
            f"{format_number(count)} {were_skipped} gradient was not finite "
            f"({_in_steps(skipped.steps[skipped.values > 0])})."
        )
    broken = {
        name: series
        for name, series in run.metrics.items()
        if len(series.finite) < len(series.values) and name not in UNDEFINED_IN_SHORT_STEPS
    }
    if broken:
        where = np.unique(np.concatenate([series.steps[~np.isfinite(series.values)] for series in broken.values()]))
        names = ", ".join([*list(broken)[:5], *(["..."] if len(broken) > 5 else [])])
        yield f"Non-finite values in {_in_steps(where)}: {names}."
    for name in run.metrics:
        if match := EXCLUDED.match(name):
            yield f"{match[1]} was not believed in {_in_steps(run[name].steps)}, and not used again: the log says why."
        if match := REFUSED.match(name):
            yield f"{format_number(run[name].finite.sum())} answers of {match[1]} were refused: {REFUSALS[match[2]]}."
    low = {int(match[1]): run[name].end for name in run.metrics if (match := LAYER.match(name))}
    low = {layer: value for layer, value in low.items() if value < LOW_AGREEMENT}
    if low:
        worst = min(low, key=low.__getitem__)
        layers = f"{len(low)} layer{'s' if len(low) > 1 else ''}"
        yield (
            f"Route agreement is below {format_percent(LOW_AGREEMENT)} in {layers}; the lowest is layer {worst} with "
            f"{format_percent(low[worst])}. `moe-replay verify` distinguishes noise from misalignment."
        )
    yield from _sample_warnings(run)


def _sample_warnings(run: RunRecord) -> Iterator[str]:
    if (unrouted := run["routing/unrouted_fraction"].end) > 0.5:
        yield f"{format_percent(unrouted)} of the tokens had no route to replay."
    if (ess := run["mismatch/rollout_vs_old/ess"].end) < 0.5:
        yield f"The effective sample size was only {format_percent(ess)} of the samples: the policies are far apart."
    if (unscored := run["reward/unscored"].end) > 0:
        yield f"At the end, {format_percent(unscored)} of the samples could not be scored."
    if (cut := run["completion/truncated"].end) > 0.5:
        yield f"At the end, {format_percent(cut)} of the completions were truncated at rollout.max_tokens."
    if (idle := run["reward/frac_groups_zero_std"].end) > 0.8:
        yield f"At the end, {format_percent(idle)} of the groups had equal rewards and had no gradient."


def verdict(run: RunRecord, problems: Sequence[str]) -> str:
    """Return one line: whether the run is healthy, or which of its problems to look at first."""
    planned = run.settings.get("steps")
    unfinished = isinstance(planned, int) and run.steps < planned and not run.failure
    progress = f" The run stopped or is still running, after step {run.steps} of {planned}." if unfinished else ""
    if problems:
        others = len(problems) - 1
        more = f" ({others} more warning{'s' if others > 1 else ''} below)" if others else ""
        return f"Look at this first: {problems[0]}{more}{progress}"
    aligned = run["routing/aligned"].finite
    routes = f"routes aligned in all {len(aligned)} steps with enough tokens to tell, " if len(aligned) else ""
    return f"Healthy: {routes}no update skipped, all metrics finite.{progress}"


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


# ---- figures ---------------------------------------------------------------------------------------------------------


def reward_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    functions = re.compile(r"reward/(?!mean$|std$|unscored$|timeouts$|frac_groups_zero_std$)")
    parts = [name for name in run.metrics if functions.match(name)]
    curves = [Curve(run["reward/mean"], "training", "plain"), Curve(run["eval/reward"], "evaluation", "second")]
    yield from curve_figure(
        "reward",
        "Reward",
        "Mean reward over the samples of a step.",
        curves,
    )
    if len(parts) > 1:
        roles: tuple[Role, ...] = ("plain", "second", "third", "fifth", "sixth", "seventh", "fourth")
        of_functions = [
            Curve(run[name], name.removeprefix("reward/"), role) for name, role in zip(parts, roles, strict=False)
        ]
        yield from curve_figure("rewards", "Rewards by function", "One curve per reward function.", of_functions)


def mismatch_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    """Yield the mismatch of log-probs between rollout and trainer, with and without replay."""
    for key, unit, title, caption in MISMATCH_FIGURES:
        curves = mismatch_curves(run, key)
        percent = key == "frac_ratio_gt2"
        name = f"mismatch-{key.replace('/', '-').replace('_', '-')}"
        mark = 1.0 if key == "ratio/max" else None
        yield from curve_figure(name, title, caption, curves, unit, log=not percent, percent=percent, mark=mark)
    ratios = [
        Curve(run["mismatch/old_vs_train/ratio/mean"], "train / old", "plain"),
        Curve(run["mismatch/rollout_vs_train/ratio/mean"], "train / rollout", "second"),
    ]
    text = (
        "Mean probability ratio over tokens, of the updates to the old-log-prob pass and to the rollout. 1: equal "
        "policies. A gap between the curves is the mismatch between engine and trainer."
    )
    yield from curve_figure("ratio-mean", "Mean importance ratio", text, ratios, "mean ratio", mark=1.0)
    moved = [Curve(run["mismatch/old_vs_train/k3_kl"], "", "plain")]
    text = "KL divergence between the policy before and after the updates of a step (k3)."
    yield from curve_figure("policy-change", "Policy change within a step", text, moved, "k3", log=True)


def mismatch_curves(run: RunRecord, key: str) -> list[Curve]:
    """Return curves with and without replay, or one curve if old log-probs come from native routing."""
    scored, native = (run[f"mismatch/{passes}/{key}"] for passes in ("rollout_vs_old", "rollout_vs_native"))
    if run.scored_with_replay:
        return [Curve(native, "without replay", "native"), Curve(scored, "with replay", "replayed")]
    return [Curve(scored, "native routing", "native")]


def route_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    """Yield route agreement between rollout and trainer, and the fraction replayed."""
    text = (
        "Fraction of (token, layer) pairs that the trainer's routers, routing natively, send to the same experts as "
        "the rollout did."
    )
    agreement = [Curve(run["routing/agreement"])]
    yield from curve_figure("agreement", "Route agreement", text, agreement, "agreement", percent=True, mark=1.0)
    layers = {int(match[1]): run[name] for name in run.metrics if (match := LAYER.match(name))}
    if any(len(series.finite) for series in layers.values()):
        yield _layer_map(dict(sorted(layers.items())))
    fractions = [
        Curve(run["routing/replayed_fraction"], "replayed", "replayed"),
        Curve(run["routing/unrouted_fraction"], "no route: native", "native"),
    ]
    text = "Tokens with a replayed route, and tokens without a route: the last sampled token, tool outputs."
    yield from curve_figure("replayed", "Routes replayed", text, fractions, "fraction of tokens", percent=True)
    text = "Load of the busiest expert of a layer above an even split, averaged over layers. 0: perfectly balanced."
    yield from curve_figure(
        "load", "Load of the busiest expert", text, [Curve(run["routing/load_violation"])], mark=0.0
    )


def learning_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    text = "The loss that updates minimise. In policy-gradient training its level says little."
    losses = [Curve(run["loss/total"], "total", "plain"), Curve(run["loss/policy"], "policy", "second")]
    if not len(run["loss/policy"].finite):
        losses = [Curve(run["loss/total"])]
    yield from curve_figure("loss", "Loss", text, losses)
    text = "Gradient norm before clipping."
    yield from curve_figure("grad-norm", "Gradient norm", text, [Curve(run["loss/grad_norm"])], log=True)
    text = "Mean entropy of the trainer's distribution at sampled tokens, in nats. Near 0: nearly deterministic."
    yield from curve_figure("entropy", "Entropy", text, [Curve(run["loss/entropy"])], "nats")
    text = "Fraction of tokens whose ratio was clipped."
    clips = [Curve(run["loss/clip_low"], "below", "plain"), Curve(run["loss/clip_high"], "above", "second")]
    yield from curve_figure("clipped", "Clipped tokens", text, clips, "fraction of tokens", percent=True)


def sample_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    mean, low, high = (run[f"completion/length_{part}"] for part in ("mean", "min", "max"))
    if len(mean.finite):
        text = "Tokens per completion: mean, and range from shortest to longest."
        yield render("length", "Completion length", text, lambda axes: plot_band(axes, mean, low, high, "tokens"))
    shares = [
        Curve(run["completion/truncated"], "truncated", "plain"),
        Curve(run["reward/frac_groups_zero_std"], "groups without signal", "second"),
    ]
    text = "Truncated completions, and groups with equal rewards, which have no gradient."
    yield from curve_figure("signal", "Samples with little signal", text, shares, "fraction", percent=True)
    ages = [
        Curve(run["completion/staleness_mean"], "mean", "plain"),
        Curve(run["completion/staleness_max"], "max", "second"),
    ]
    if any(age.series.finite.any() for age in with_data(ages)):  # always 0 in synchronous runs
        text = "Age of the sampling weights in steps."
        yield from curve_figure("staleness", "Staleness of samples", text, ages, "steps")


def time_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    roles: tuple[tuple[str, Role], ...] = (
        ("rollout", "replayed"),
        ("score", "recorded"),
        ("train", "plain"),
        ("sync", "third"),
        ("eval", "second"),
    )
    parts = [Curve(run[f"time/{part}"], part, role) for part, role in roles]
    whole = run["time/step"]
    parts = [part for part in parts if _is_significant(part.series, whole)]
    if parts:
        text = "Seconds per phase of a step: rollout, scoring, training, weight sync, evaluation."
        yield render("time", "Time per step", text, lambda axes: plot_stack(axes, parts, "seconds"))
    text = "Tokens of all sequences per second, including prompts."
    yield from curve_figure("speed", "Tokens per second", text, [Curve(run["time/tokens_per_second"])], "tokens / s")
    text = "Model FLOPs utilisation: operations that the model needs, without recomputation, over the GPU's peak."
    used = [Curve(run["time/score_mfu"], "score", "recorded"), Curve(run["time/train_mfu"], "train", "plain")]
    yield from curve_figure("mfu", "MFU", text, used, "fraction of peak", percent=True)


def _layer_map(layers: dict[int, Series]) -> RenderedFigure:
    steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
    table = np.full((len(layers), len(steps)), np.nan)
    for row, series in enumerate(layers.values()):
        table[row, np.searchsorted(steps, series.steps)] = series.values
    table = np.stack([downsample(Series(steps, row))[1] for row in table])
    text = "Route agreement by decoder layer (bottom to top) and step. Differences accumulate with depth."
    edges = (float(steps[0]) - 0.5, float(steps[-1]) + 0.5)
    return render(
        "agreement-layers",
        "Agreement by layer and step",
        text,
        lambda axes: plot_heatmap(axes, table, list(layers), edges, "layer", "step"),
    )


def _is_significant(part: Series, whole: Series) -> bool:
    return len(part.steps) == len(whole.steps) > 0 and np.nansum(part.values) > 0.005 * np.nansum(whole.values)


# ---- completions -----------------------------------------------------------------------------------------------------


def add_completions(page: Page, folder: Path) -> list[str]:
    """Add a few completions of the last step to the report of a run, and write completions.html.

    Returns warnings about completions that cannot be shown. Adds nothing if the run logged no completions.
    """
    steps = completion_steps(folder)
    if not steps:
        return []
    try:
        by_step = {step: read_completions(steps[step]) for step in _spread(list(steps), STEPS_ON_PAGE)}
    except (CompletionsError, MissingExtraError) as error:
        return [f"Completions are not shown: {error}"]
    last = max(by_step)
    page.text_section(
        f"Completions of step {last}",
        f"The best and the worst by reward. {COMPLETIONS_PAGE} next to this page has more, also of earlier steps; all "
        "are in completions/*.parquet.",
        _samples(by_step[last], COMPLETIONS_IN_REPORT),
    )
    write_completion_page(folder, by_step)
    return []


def write_completion_page(folder: Path, by_step: dict[int, list[Completion]]) -> Path:
    """Write completions.html: the best and the worst completions of each step."""
    page = Page(f"Completions of {folder.resolve().name}")
    rewards = [sample.reward for samples in by_step.values() for sample in samples if not math.isnan(sample.reward)]
    mean = f"mean reward {format_number(sum(rewards) / len(rewards))}" if rewards else "none of them scored"
    page.head(f"{len(by_step)} steps with logged completions · {mean}", [])
    for step, samples in by_step.items():
        page.text_section(f"Step {step}", _reward_range(samples), _samples(samples, SAMPLES_PER_STEP))
    return page.write(folder / COMPLETIONS_PAGE, folder / "figures")


def _reward_range(completions: Sequence[Completion]) -> str:
    scored = [completion.reward for completion in completions if not math.isnan(completion.reward)]
    if not scored:
        return f"{len(completions)} completions, none of them scored."
    low, mean, high = map(format_number, (min(scored), sum(scored) / len(scored), max(scored)))
    return f"{len(completions)} completions; lowest, mean and highest reward: {low}, {mean}, {high}."


def _samples(completions: Sequence[Completion], count: int) -> Iterator[TextSample]:
    for sample in best_and_worst(completions, count):
        reward, advantage = format_number(sample.reward), format_number(sample.advantage)
        facts = [f"row {sample.row}", f"reward {reward}", f"advantage {advantage}"]
        if len(sample.scores) > 1:
            facts += [f"{name} {format_number(value)}" for name, value in sample.scores.items()]
        facts += [f"{sample.tokens} tokens", f"ended by {sample.finish_reason}"]
        prompt, completion = printable(sample.prompt), printable(sample.completion)
        yield TextSample(
            " · ".join(facts),
            prompt if len(prompt) <= MAX_CHARACTERS else f"…{prompt[-MAX_CHARACTERS:]}",
            completion if len(completion) <= MAX_CHARACTERS else f"{completion[:MAX_CHARACTERS]}…",
        )


def _spread(steps: list[int], count: int) -> list[int]:
    """Return `count` evenly spaced steps, including the first and the last."""
    if len(steps) <= count:
        return steps
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]
