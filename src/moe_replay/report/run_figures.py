"""The figures of a run, by section; what was not measured is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import numpy as np

from moe_replay.report.colours import Role
from moe_replay.report.drawing import Picture, draw
from moe_replay.report.plots import Curve, drawable, paint_band, paint_curves, paint_heat, paint_stack, thinned
from moe_replay.report.record import RunRecord, Series

MISMATCHES = (
    (
        "k3_kl",
        "k3",
        "Distance of the two policies (k3)",
        "How far the trainer's probabilities are from those the tokens were sampled with, on average for each token "
        "(an estimate of the KL divergence). 0: both are the same policy.",
    ),
    (
        "logprob_abs_diff/mean",
        "|Δ log p|",
        "Difference of log-probabilities",
        "The absolute difference between rollout and trainer for a sampled token, on average.",
    ),
    (
        "ratio/max",
        "largest ratio",
        "Largest probability ratio",
        "The token whose probability grew most from rollout to trainer. 1: none did.",
    ),
    (
        "beyond_two",
        "share of tokens",
        "Tokens off by a factor of two, F(2)",
        "The share of tokens that are at least twice as probable in one of the two as in the other.",
    ),
)
LAYER = re.compile(r"routing/agreement/layer_(\d+)$")


def reward_figures(run: RunRecord) -> Iterator[Picture]:
    """Rewards of training and of evaluation."""
    parts = [name for name in run.metrics if re.match(r"reward/(?!mean$|std$|unscored$)", name)]
    curves = [Curve(run["reward/mean"], "training", "plain"), Curve(run["eval/reward"], "evaluation", "second")]
    yield from curve_figure(
        "reward",
        "Reward",
        "Mean reward of the samples of a step.",
        curves,
    )
    if len(parts) > 1:
        roles: tuple[Role, ...] = ("plain", "second", "third", "fifth", "sixth", "seventh", "fourth")
        each = [Curve(run[name], name.removeprefix("reward/"), role) for name, role in zip(parts, roles, strict=False)]
        yield from curve_figure("rewards", "Rewards one by one", "Each reward function by itself.", each)


def mismatch_figures(run: RunRecord) -> Iterator[Picture]:
    """The rollout's log-probs against the trainer's, with and without replay."""
    for key, unit, title, caption in MISMATCHES:
        curves = mismatch_curves(run, key)
        share = key == "beyond_two"
        name = f"mismatch-{key.replace('/', '-').replace('_', '-')}"
        yield from curve_figure(name, title, caption, curves, unit, log=not share, share=share)
    moved = [Curve(run["mismatch/old_vs_train/k3_kl"], "", "plain")]
    text = "How far the updates of a step moved the policy away from the one at its beginning (k3)."
    yield from curve_figure("policy-change", "Policy change within a step", text, moved, "k3", log=True)


def mismatch_curves(run: RunRecord, key: str) -> list[Curve]:
    """With and without replay; one curve where the trainer's own routes are all there is."""
    scored, native = (run[f"mismatch/{passes}/{key}"] for passes in ("rollout_vs_old", "rollout_vs_native"))
    if run.scored_with_replay:
        return [Curve(native, "without replay", "native"), Curve(scored, "with replay", "replayed")]
    return [Curve(scored, "the trainer's own routes", "native")]


def route_figures(run: RunRecord) -> Iterator[Picture]:
    """How alike routers choose in rollout and trainer, and how much is replayed."""
    text = (
        "The share of (token, layer) pairs that the trainer's routers, left to themselves, send to the same "
        "experts as the rollout did."
    )
    yield from curve_figure(
        "agreement", "Agreement of routes", text, [Curve(run["routing/agreement"])], "agreement", share=True
    )
    layers = {int(found[1]): run[name] for name in run.metrics if (found := LAYER.match(name))}
    if any(len(series.finite) for series in layers.values()):
        yield _layer_map(dict(sorted(layers.items())))
    fractions = [
        Curve(run["routing/replayed_fraction"], "replayed", "replayed"),
        Curve(run["routing/unrouted_fraction"], "no route: native", "native"),
    ]
    text = "Tokens whose route was replayed, and those without one: the last token sampled, a tool's words."
    yield from curve_figure("replayed", "Routes replayed", text, fractions, "share of tokens", share=True)
    text = "What the busiest expert of a layer has beyond an even share, averaged over layers. 0: all alike."
    yield from curve_figure("load", "Load of the busiest expert", text, [Curve(run["routing/load_violation"])])


def learning_figures(run: RunRecord) -> Iterator[Picture]:
    """Loss, gradients, entropy, clipping."""
    text = "Loss that the update minimises. In policy-gradient training its level says little."
    losses = [Curve(run["loss/total"], "total", "plain"), Curve(run["loss/policy"], "policy", "second")]
    if not len(run["loss/policy"].finite):
        losses = [Curve(run["loss/total"])]
    yield from curve_figure("loss", "Loss", text, losses)
    text = "Norm of the gradient before it is clipped."
    yield from curve_figure("grad-norm", "Gradient norm", text, [Curve(run["loss/grad_norm"])], log=True)
    text = "Mean entropy of the trainer's distribution at sampled tokens, in nats. Near 0: it always says the same."
    yield from curve_figure("entropy", "Entropy", text, [Curve(run["loss/entropy"])], "nats")
    text = "The share of tokens whose ratio was cut off by the clip range."
    clips = [Curve(run["loss/clip_low"], "below", "plain"), Curve(run["loss/clip_high"], "above", "second")]
    yield from curve_figure("clipped", "Clipped tokens", text, clips, "share of tokens", share=True)


def sample_figures(run: RunRecord) -> Iterator[Picture]:
    """Completions: lengths, signal, age."""
    mean, low, high = (run[f"completion/length_{part}"] for part in ("mean", "min", "max"))
    if len(mean.finite):
        text = "Tokens of a completion: the mean, and from the shortest to the longest."
        yield draw("length", "Length of completions", text, lambda axes: paint_band(axes, mean, low, high, "tokens"))
    shares = [
        Curve(run["completion/truncated"], "cut off", "plain"),
        Curve(run["completion/groups_without_signal"], "groups of equal rewards", "second"),
    ]
    text = "Completions cut off at the limit, and groups that teach nothing since all their rewards are the same."
    yield from curve_figure("signal", "Samples that teach little", text, shares, "share", share=True)
    ages = [
        Curve(run["completion/staleness_mean"], "mean", "plain"),
        Curve(run["completion/staleness_max"], "max", "second"),
    ]
    if any(age.series.finite.any() for age in drawable(ages)):  # always 0 where sampling waits for training
        text = "How many steps older than the policy the weights were that sampled."
        yield from curve_figure("staleness", "Age of samples", text, ages, "steps")


def time_figures(run: RunRecord) -> Iterator[Picture]:
    """Where the time goes."""
    roles: tuple[tuple[str, Role], ...] = (
        ("rollout", "replayed"),
        ("score", "own"),
        ("train", "plain"),
        ("sync", "third"),
        ("eval", "second"),
    )
    parts = [Curve(run[f"time/{part}"], part, role) for part, role in roles]
    whole = run["time/step"]
    parts = [part for part in parts if _matters(part.series, whole)]
    if parts:
        text = "Seconds of each part of a step: sampling, scoring, updating, and giving the engine new weights."
        yield draw("time", "Time of a step", text, lambda axes: paint_stack(axes, parts, "seconds"))
    text = "Tokens of all sequences, prompts included, for each second of a step."
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
) -> Iterator[Picture]:
    """One figure of the curves that have something to show; none if none has."""
    shown = drawable(curves)
    if not shown:
        return
    paint = partial(paint_curves, curves=shown, unit=unit, log=log, share=share)
    yield draw(name, title, caption, paint)


def _layer_map(layers: dict[int, Series]) -> Picture:
    steps = np.unique(np.concatenate([series.steps for series in layers.values()]))
    table = np.full((len(layers), len(steps)), np.nan)
    for row, series in enumerate(layers.values()):
        table[row, np.searchsorted(steps, series.steps)] = series.values
    table = np.stack([thinned(Series(steps, row))[1] for row in table])
    text = "The same by decoder layer (upwards) and step. Differences grow with depth, since they pass on."
    edges = (float(steps[0]) - 0.5, float(steps[-1]) + 0.5)
    return draw(
        "agreement-layers",
        "Agreement by layer and step",
        text,
        lambda axes: paint_heat(axes, table, list(layers), edges, "layer", "step"),
    )


def _matters(part: Series, whole: Series) -> bool:
    return len(part.steps) == len(whole.steps) > 0 and np.nansum(part.values) > 0.005 * np.nansum(whole.values)
