"""The figures of a run by section; metrics that were not logged are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np

from moe_replay.report.colours import Role
from moe_replay.report.plots import Curve, downsample, plot_band, plot_curves, plot_heatmap, plot_stack, with_data
from moe_replay.report.record import RunRecord, Series
from moe_replay.report.rendering import RenderedFigure, render

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
        "beyond_two",
        "fraction of tokens",
        "Tokens off by a factor of two, F(2)",
        "Fraction of tokens that are at least twice as probable under one of the two policies as under the other.",
    ),
)
LAYER = re.compile(r"routing/agreement/layer_(\d+)$")


def reward_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    """Yield training and evaluation rewards."""
    parts = [name for name in run.metrics if re.match(r"reward/(?!mean$|std$|unscored$|timeouts$)", name)]
    curves = [Curve(run["reward/mean"], "training", "plain"), Curve(run["eval/reward"], "evaluation", "second")]
    yield from curve_figure(
        "reward",
        "Reward",
        "Mean reward over the samples of a step.",
        curves,
    )
    if len(parts) > 1:
        roles: tuple[Role, ...] = ("plain", "second", "third", "fifth", "sixth", "seventh", "fourth")
        each = [Curve(run[name], name.removeprefix("reward/"), role) for name, role in zip(parts, roles, strict=False)]
        yield from curve_figure("rewards", "Rewards by function", "Each reward function separately.", each)


def mismatch_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    """Yield the mismatch of log-probs between rollout and trainer, with and without replay."""
    for key, unit, title, caption in MISMATCH_FIGURES:
        curves = mismatch_curves(run, key)
        share = key == "beyond_two"
        name = f"mismatch-{key.replace('/', '-').replace('_', '-')}"
        mark = 1.0 if key == "ratio/max" else None
        yield from curve_figure(name, title, caption, curves, unit, log=not share, share=share, mark=mark)
    ratios = [
        Curve(run["mismatch/old_vs_train/ratio/mean"], "train / old", "plain"),
        Curve(run["mismatch/rollout_vs_train/ratio/mean"], "train / rollout", "second"),
    ]
    text = (
        "Mean over tokens of the probability in the updates over that of the old-log-prob pass, and over that of the "
        "rollout. 1: nothing lies between them. A gap between the curves is the mismatch of engine and trainer."
    )
    yield from curve_figure("ratio-mean", "Mean importance ratio", text, ratios, "mean ratio", mark=1.0)
    moved = [Curve(run["mismatch/old_vs_train/k3_kl"], "", "plain")]
    text = "How far the updates of a step moved the policy from where it was before them (k3)."
    yield from curve_figure("policy-change", "Policy change within a step", text, moved, "k3", log=True)


def mismatch_curves(run: RunRecord, key: str) -> list[Curve]:
    """Return curves with and without replay, or one curve if old log-probs come from native routing."""
    scored, native = (run[f"mismatch/{passes}/{key}"] for passes in ("rollout_vs_old", "rollout_vs_native"))
    if run.scored_with_replay:
        return [Curve(native, "without replay", "native"), Curve(scored, "with replay", "replayed")]
    return [Curve(scored, "native routing", "native")]


def route_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    """Yield route agreement between rollout and trainer, and how much is replayed."""
    text = (
        "Fraction of (token, layer) pairs that the trainer's routers, routing natively, send to the same experts as "
        "the rollout did."
    )
    agreement = [Curve(run["routing/agreement"])]
    yield from curve_figure("agreement", "Route agreement", text, agreement, "agreement", share=True, mark=1.0)
    layers = {int(found[1]): run[name] for name in run.metrics if (found := LAYER.match(name))}
    if any(len(series.finite) for series in layers.values()):
        yield _layer_map(dict(sorted(layers.items())))
    fractions = [
        Curve(run["routing/replayed_fraction"], "replayed", "replayed"),
        Curve(run["routing/unrouted_fraction"], "uncovered: native", "native"),
    ]
    text = "Tokens whose route was replayed, and uncovered ones: the last sampled token, the output of tools."
    yield from curve_figure("replayed", "Routes replayed", text, fractions, "fraction of tokens", share=True)
    text = "Load of the busiest expert of a layer above an even split, averaged over layers. 0: perfectly balanced."
    yield from curve_figure(
        "load", "Load of the busiest expert", text, [Curve(run["routing/load_violation"])], mark=0.0
    )


def learning_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    """Yield loss, gradient norm, entropy and clipping."""
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
    yield from curve_figure("clipped", "Clipped tokens", text, clips, "fraction of tokens", share=True)


def sample_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    """Yield lengths, learning signal and staleness of completions."""
    mean, low, high = (run[f"completion/length_{part}"] for part in ("mean", "min", "max"))
    if len(mean.finite):
        text = "Tokens per completion: mean, and range from shortest to longest."
        yield render("length", "Completion length", text, lambda axes: plot_band(axes, mean, low, high, "tokens"))
    shares = [
        Curve(run["completion/truncated"], "truncated", "plain"),
        Curve(run["completion/groups_without_signal"], "groups without signal", "second"),
    ]
    text = "Truncated completions, and groups whose rewards are all equal, which give no gradient."
    yield from curve_figure("signal", "Samples with little signal", text, shares, "fraction", share=True)
    ages = [
        Curve(run["completion/staleness_mean"], "mean", "plain"),
        Curve(run["completion/staleness_max"], "max", "second"),
    ]
    if any(age.series.finite.any() for age in with_data(ages)):  # always 0 where sampling waits for training
        text = "How many steps older than the policy the sampling weights were."
        yield from curve_figure("staleness", "Staleness of samples", text, ages, "steps")


def time_figures(run: RunRecord) -> Iterator[RenderedFigure]:
    """Yield the time per phase, and throughput."""
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
        text = "Seconds per phase of a step: sampling, scoring, updating, syncing weights to the engine, evaluating."
        yield render("time", "Time per step", text, lambda axes: plot_stack(axes, parts, "seconds"))
    text = "Tokens of all sequences, prompts included, per second of a step."
    yield from curve_figure("speed", "Tokens per second", text, [Curve(run["time/tokens_per_second"])], "tokens / s")


def curve_figure(
    name: str,
    title: str,
    caption: str,
    curves: list[Curve],
    unit: str = "",
    *,
    log: bool = False,
    share: bool = False,
    mark: float | None = None,
) -> Iterator[RenderedFigure]:
    """Yield one figure of the curves with data; nothing if there is none."""
    shown = with_data(curves)
    if not shown:
        return
    plot = partial(plot_curves, curves=shown, unit=unit, log=log, share=share, mark=mark)
    yield render(name, title, caption, plot)


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
