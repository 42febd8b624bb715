"""The report page of an attribution, and its section in the report of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_replay.report.page import (
    MISSING,
    Card,
    Page,
    Table,
    describe_change,
    explain_level,
    format_metric,
    format_number,
    format_percent,
    is_level,
)
from moe_replay.report.plots import (
    HEAT,
    INK,
    RenderedFigure,
    Role,
    colour,
    legend,
    plot_bars,
    plot_diagonal,
    plot_heatmap,
    render,
)
from moe_replay.verification.attribution import (
    AGAIN,
    EXTREME,
    HISTOGRAM_EDGES,
    NATIVE,
    R2,
    R3,
    AlignmentSummary,
    Attribution,
    PassScores,
    RoutingScores,
)
from moe_replay.verification.thresholds import failures

_ROWS = (
    ("k3 (KL per token)", "k3_kl"),
    ("k1 (KL per token)", "k1_kl"),
    ("|Δ log p|, mean", "logprob_abs_diff/mean"),
    ("|Δ log p|, largest", "logprob_abs_diff/max"),
    ("ratio, largest", "ratio/max"),
    ("effective samples", "ess"),
    ("F(2)", "frac_ratio_gt2"),
)


def read_attribution(path: Path) -> Attribution:
    return Attribution.from_json(path.read_text(encoding="utf-8", errors="replace"))


def write_attribution_report(attribution: Attribution, output: Path) -> Path:
    """Write the report page of an attribution, and its figures as PNG files in `<stem>-figures` next to it."""
    page = Page("Rollout against trainer")
    labels = " · ".join(f"{name} {value}" for name, value in attribution.labels.items())
    page.head(labels or "one batch", _summary(attribution))
    page.cards(_cards(attribution))
    page.warnings(failures(attribution))
    page.section("Where they differ", attribution_figures(attribution), _counts(attribution), _passes(attribution))
    return page.write(output, output.with_name(f"{output.stem}-figures"))


def add_attribution(page: Page, attribution: Attribution) -> None:
    """Add a section with the verdict, the table of passes and all figures."""
    text = f"{_verdict(attribution)} {_counts(attribution)}"
    page.section("Attribution of one batch", attribution_figures(attribution), text, _passes(attribution))


def _counts(attribution: Attribution) -> str:
    return f"{attribution.samples} samples, {attribution.tokens:,} tokens, {attribution.scored:,} of them scored."


def _summary(attribution: Attribution) -> Iterator[str]:
    yield _verdict(attribution)
    routing = attribution.routing
    yield (
        f"Routing natively, the trainer picks the rollout's experts in {format_percent(routing.overall)} of all "
        f"(token, layer) pairs; {format_percent(routing.differing_tokens)} of the tokens differ in at least one layer."
    )
    if NATIVE in attribution.passes and R3 in attribution.passes:
        native, replayed = (attribution.passes[name].mismatch.get("k3_kl", float("nan")) for name in (NATIVE, R3))
        yield (
            f"The mean k3 between rollout and trainer is {format_number(native)} per token with native routing and "
            f"{format_number(replayed)} with the rollout's routes replayed: {describe_change(native, replayed)}."
        )
        if is_level(native, replayed):
            yield explain_level(routing.overall)


def _verdict(attribution: Attribution) -> str:
    alignment = attribution.alignment
    verdict = {
        "aligned": "The routes are aligned: each belongs to its token and layer.",
        "misaligned": "The routes are MISALIGNED.",
        "unclear": "Whether the routes are aligned is unclear.",
    }.get(alignment.status, alignment.status)
    return " ".join([verdict, *([f"{alignment.detail}."] if alignment.detail else []), *alignment.notes])


def _cards(attribution: Attribution) -> Iterator[Card]:
    yield Card("alignment", attribution.alignment.status)
    yield Card("route agreement", format_percent(attribution.routing.overall))
    yield Card("tokens that differ", format_percent(attribution.routing.differing_tokens))
    for name, label in ((NATIVE, "k3 without replay"), (R3, "k3 with replay")):
        if name in attribution.passes:
            yield Card(
                label, format_number(attribution.passes[name].mismatch.get("k3_kl", float("nan"))), "mean over tokens"
            )


def _median_difference(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median of |Δ log p| over the stored tokens, at most 2000."""
    differences = np.abs(np.diff(np.array(pairs, float).reshape(-1, 2)))
    finite = differences[np.isfinite(differences)]
    return float(np.median(finite)) if len(finite) else math.nan


def _passes(attribution: Attribution) -> Table | None:
    passes = attribution.passes
    if not passes:
        return None
    rows = [
        (label, *(format_metric(f"/{key}", scores.mismatch.get(key, math.nan)) for scores in passes.values()))
        for label, key in _ROWS
    ]
    if attribution.scatter:
        medians = {name: _median_difference(pairs) for name, pairs in attribution.scatter.items()}
        rows.insert(3, ("|Δ log p|, median", *(format_number(medians.get(name, math.nan)) for name in passes)))
    rows += [
        (f"tokens off by a factor of {limit}", *(str(scores.extreme.get(limit, MISSING)) for scores in passes.values()))
        for limit in EXTREME
    ]
    against_first = [format_number(scores.own.get("k3_kl", math.nan)) for scores in passes.values()]
    rows.append(("k3 against the first pass", *against_first))
    colours = [f"var(--{ROLES.get(name, 'plain')})" for name in passes]
    return Table(("compared with the rollout", *passes), rows, colours)


# ---- figures ---------------------------------------------------------------------------------------------------------


ROLES: dict[str, Role] = {NATIVE: "native", AGAIN: "noise", R2: "recorded", R3: "replayed"}
TITLES = {NATIVE: "native routing", AGAIN: "native, repeated", R2: "R2", R3: "replayed (R3)"}
_STYLES = {
    NATIVE: ("-", 2.4),
    AGAIN: ("--", 1.6),
    R2: (":", 1.6),
    R3: ("-", 1.6),
}  # all visible where they coincide
MAX_DOTS = 2000
# Dots are rasterized and cannot follow the page: shades that are visible on light and on dark backgrounds.
_DOTS = {NATIVE: "#e8772e", R3: "#3d97d3"}


def attribution_figures(attribution: Attribution) -> Iterator[RenderedFigure]:
    """Yield every figure that there is data for."""
    if any(attribution.scatter.values()):
        yield scatter(attribution.scatter)
    if attribution.passes:
        yield histograms(attribution.passes)
    routing = attribution.routing
    if np.isfinite(np.array(routing.by_position, float)).any():
        yield position_map(routing)
    if np.isfinite(np.array(attribution.alignment.above_chance, float)).any():
        yield shift_matrix(attribution.alignment)
    if np.isfinite(routing.agreement).any():
        yield layer_bars(routing)
    if any(routing.differing):
        yield differing_bars(routing)


def scatter(points: dict[str, tuple[tuple[float, float], ...]]) -> RenderedFigure:
    """Plot log-probs of the rollout against those of the trainer, one panel per pass."""
    shown = {name: np.array(pairs[:MAX_DOTS], float) for name, pairs in points.items() if pairs}
    values = np.concatenate(list(shown.values()))
    low = float(values[np.isfinite(values)].min(initial=-1.0))

    def plot(panels: Any) -> None:
        for axes, (name, pairs) in zip(panels if len(shown) > 1 else [panels], shown.items(), strict=True):
            plot_diagonal(axes, low, 0.0)
            axes.scatter(*pairs.T, s=7, alpha=0.45, linewidths=0, color=_DOTS.get(name, "#7c8792"), rasterized=True)
            axes.set_title(TITLES.get(name, name), color=colour(ROLES.get(name, "plain")))
            axes.set_xlim(1.05 * low, -0.03 * low)
            axes.set_ylim(1.05 * low, -0.03 * low)
            axes.set_xlabel("log p, rollout")
            axes.label_outer()
            axes.grid(True)
        (panels[0] if len(shown) > 1 else panels).set_ylabel("log p, trainer")

    text = (
        "Each dot is one sampled token. On the dashed line, rollout and trainer assign it the same probability. Both "
        "panels show the same tokens: native routing on the left, the rollout's routes replayed on the right."
    )
    return render("scatter", "Log-probabilities, rollout and trainer", text, plot, panels=len(shown))


def histograms(passes: dict[str, PassScores]) -> RenderedFigure:
    """Plot the distribution of log-ratios, one line per pass."""
    edges = np.array(HISTOGRAM_EDGES)
    positions = np.arange(len(edges) + 2)  # the outer bins are open-ended: all are drawn equally wide

    def plot(axes: Any) -> None:
        for name, scores in passes.items():
            counts = np.array(scores.histogram, float)
            fractions = counts / max(counts.sum(), 1)
            shade = colour(ROLES.get(name, "plain"))
            style, width = _STYLES.get(name, ("-", 1.6))
            axes.stairs(
                fractions, positions, label=TITLES.get(name, name), color=shade, linestyle=style, linewidth=width
            )
            if name in (NATIVE, R3):
                axes.stairs(fractions, positions, fill=True, alpha=0.2, linewidth=0, color=shade)
        even = [index for index, edge in enumerate(edges) if round(2 * np.log10(abs(edge))) in (-8, -4, 0)]
        middle = len(edges) / 2 + 0.5
        axes.set_xticks([*(index + 1 for index in even), middle], [*(_power(edges[index]) for index in even), "0"])
        axes.axvline(middle, color=INK, alpha=0.25, linewidth=0.6)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        axes.set_xlabel("log-ratio, trainer to rollout")
        axes.set_ylabel("fraction of tokens")
        axes.grid(True, axis="y")
        legend(axes)

    text = (
        "Log-ratio of the trainer's probability of a token to the rollout's, on a logarithmic scale on both sides of "
        "0. The narrower the distribution, the better."
    )
    return render("ratios", "Probability ratios", text, plot)


def position_map(routing: RoutingScores) -> RenderedFigure:
    text = (
        "Fraction of tokens that the trainer's router, routing natively, sends to the same experts as the rollout did, "
        "by decoder layer (bottom to top) and position in the sequence."
    )
    table = np.array(routing.by_position, float)
    edges = [float(edge) for edge in routing.position_edges]
    return render(
        "agreement-positions",
        "Agreement by layer and position",
        text,
        lambda axes: plot_heatmap(axes, table, list(routing.layers), edges, "layer", "position"),
    )


def shift_matrix(alignment: AlignmentSummary) -> RenderedFigure:
    """Plot agreement above chance with the routes shifted by layers and tokens."""
    table = np.array(alignment.above_chance, float)
    names = [f"{shift:+d}" if shift else "0" for shift in alignment.shifts]

    def plot(axes: Any) -> None:
        axes.imshow(table, cmap=HEAT, vmin=0, vmax=1, interpolation="none", aspect="auto")
        for row, column in np.ndindex(*table.shape):
            value = table[row, column]
            # The cell's background does not follow the page's colour scheme, so neither may the text on it.
            ink = ("#ffffff" if value < 0.55 else "#000000") if np.isfinite(value) else INK
            text = f"{value:.2f}".replace("-0.00", "0.00") if np.isfinite(value) else "-"
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9)
        here = alignment.shifts.index(0)
        axes.plot(
            here + np.array([-0.46, 0.46, 0.46, -0.46, -0.46]),
            here + np.array([-0.43, -0.43, 0.43, 0.43, -0.43]),
            color=colour("native"),
            linewidth=2,
        )
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("shift in tokens")
        axes.set_ylabel("shift in layers")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    text = (
        "Agreement of the rollout's routes with the trainer's when shifted by some layers and tokens: 1 means the same "
        "experts, 0 is chance. Aligned routes agree best at the centre, unshifted."
    )
    return render("shifts", "Shift test", text, plot)


def layer_bars(routing: RoutingScores) -> RenderedFigure:
    """Plot 1 - agreement of each layer, so that bars start at zero."""
    groups: list[tuple[str, Role, np.ndarray]] = [
        ("native routing", "native", 1 - np.array(routing.agreement, float)),
        ("earlier layers replayed", "replayed", 1 - np.array(routing.router_alone, float)),
        ("noise", "noise", 1 - np.array(routing.noise, float)),
    ]
    groups = [group for group in groups if np.isfinite(group[2]).any()]
    text = (
        "Fraction of tokens that a layer's router sends to different experts than the rollout did (1 - agreement): "
        "with native routing in all layers; with all earlier layers replayed; and between two trainer passes (noise)."
    )
    return render(
        "agreement-bars",
        "Routing disagreement by layer",
        text,
        lambda axes: plot_bars(axes, groups, routing.layers, "layer"),
    )


def differing_bars(routing: RoutingScores) -> RenderedFigure:
    """Plot tokens by the number of layers in which they are routed differently."""
    counts = np.array(routing.differing, float)
    last = int(np.flatnonzero(counts).max()) + 1
    shares = counts[:last] / counts.sum()
    text = "Fraction of tokens routed differently from the rollout in this many layers. 0: routed identically in all."
    return render(
        "differing",
        "Layers that differ, per token",
        text,
        lambda axes: plot_bars(axes, [("", "native", shares)], range(last), "layers that differ"),
    )


def _power(edge: float) -> str:
    exponent = round(np.log10(abs(edge)))
    size = "1" if exponent == 0 else f"1e{exponent}"
    return f"-{size}" if edge < 0 else size
