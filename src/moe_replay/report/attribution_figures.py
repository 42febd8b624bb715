"""The figures of an attribution: where rollout and trainer differ, and what replay changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from moe_replay.report.colours import INK, Role, colour
from moe_replay.report.drawing import Picture, draw
from moe_replay.report.plots import HEAT, diagonal, legend, paint_bars, paint_heat
from moe_replay.tools.attribution.result import (
    AGAIN,
    HISTOGRAM_EDGES,
    NATIVE,
    R2,
    R3,
    Alignment,
    Attribution,
    PassScores,
    RoutingScores,
)

ROLES: dict[str, Role] = {NATIVE: "native", AGAIN: "noise", R2: "own", R3: "replayed"}
TITLES = {NATIVE: "own routes", AGAIN: "once more", R2: "R2", R3: "replayed (R3)"}
_STYLES = {NATIVE: ("-", 2.4), AGAIN: ("--", 1.6), R2: (":", 1.6), R3: ("-", 1.6)}  # those that coincide are all seen
MOST_DOTS = 2000
# Dots are pixels, which do not change with the page: shades that are seen on light and on dark ground.
_DOTS = {NATIVE: "#e8772e", R3: "#3d97d3"}


def attribution_figures(found: Attribution) -> Iterator[Picture]:
    """All figures that the data allows."""
    if any(found.scatter.values()):
        yield scatter(found.scatter)
    if found.passes:
        yield histograms(found.passes)
    routing = found.routing
    if np.isfinite(np.array(routing.by_position, float)).any():
        yield position_map(routing)
    if np.isfinite(np.array(found.alignment.above_chance, float)).any():
        yield shift_matrix(found.alignment)
    if np.isfinite(routing.agreement).any():
        yield layer_bars(routing)
    if any(routing.differing):
        yield differing_bars(routing)


def scatter(points: dict[str, tuple[tuple[float, float], ...]]) -> Picture:
    """Log-probs of the rollout against those of the trainer, one panel for each pass."""
    shown = {name: np.array(pairs[:MOST_DOTS], float) for name, pairs in points.items() if pairs}
    every = np.concatenate(list(shown.values()))
    low = float(every[np.isfinite(every)].min(initial=-1.0))

    def paint(panels: Any) -> None:
        for axes, (name, pairs) in zip(panels if len(shown) > 1 else [panels], shown.items(), strict=True):
            diagonal(axes, low, 0.0)
            axes.scatter(*pairs.T, s=7, alpha=0.45, linewidths=0, color=_DOTS.get(name, "#7c8792"), rasterized=True)
            axes.set_title(TITLES.get(name, name), color=colour(ROLES.get(name, "plain")))
            axes.set_xlim(1.05 * low, -0.03 * low)
            axes.set_ylim(1.05 * low, -0.03 * low)
            axes.set_xlabel("log p, rollout")
            axes.label_outer()
            axes.grid(True)
        (panels[0] if len(shown) > 1 else panels).set_ylabel("log p, trainer")

    text = (
        "Each dot is one sampled token. On the dashed line, rollout and trainer give it the same probability; the same "
        "tokens on the left with the trainer's own routes, on the right with those of the rollout."
    )
    return draw("scatter", "Log-probabilities, rollout and trainer", text, paint, panels=len(shown))


def histograms(passes: dict[str, PassScores]) -> Picture:
    """Tokens by log-ratio, one line for each pass."""
    edges = np.array(HISTOGRAM_EDGES)
    places = np.arange(len(edges) + 2)  # the outer bins are open: all are drawn equally wide

    def paint(axes: Any) -> None:
        for name, one in passes.items():
            counts = np.array(one.histogram, float)
            shares = counts / max(counts.sum(), 1)
            shade = colour(ROLES.get(name, "plain"))
            style, width = _STYLES.get(name, ("-", 1.6))
            axes.stairs(shares, places, label=TITLES.get(name, name), color=shade, linestyle=style, linewidth=width)
            if name in (NATIVE, R3):
                axes.stairs(shares, places, fill=True, alpha=0.2, linewidth=0, color=shade)
        even = [place for place, edge in enumerate(edges) if round(2 * np.log10(abs(edge))) in (-8, -4, 0)]
        middle = len(edges) / 2 + 0.5
        axes.set_xticks([*(place + 1 for place in even), middle], [*(_power(edges[place]) for place in even), "0"])
        axes.axvline(middle, color=INK, alpha=0.25, linewidth=0.6)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
        axes.set_xlabel("log of the ratio, trainer to rollout")
        axes.set_ylabel("share of tokens")
        axes.grid(True, axis="y")
        legend(axes)

    text = (
        "How far the trainer's probability of a token is from the rollout's, on a logarithmic scale to both sides of "
        "0. The narrower about the middle, the better."
    )
    return draw("ratios", "Probability ratios", text, paint)


def position_map(routing: RoutingScores) -> Picture:
    """Agreement by layer and position."""
    text = (
        "The share of tokens that the trainer's router, left to itself, sends to the same experts as the rollout did, "
        "by decoder layer (upwards) and position in the sequence."
    )
    table = np.array(routing.by_position, float)
    edges = [float(edge) for edge in routing.position_edges]
    return draw(
        "agreement-positions",
        "Agreement by layer and position",
        text,
        lambda axes: paint_heat(axes, table, list(routing.layers), edges, "layer", "position"),
    )


def shift_matrix(alignment: Alignment) -> Picture:
    """Agreement above chance when routes are moved by layers and tokens."""
    table = np.array(alignment.above_chance, float)
    names = [f"{shift:+d}" if shift else "0" for shift in alignment.shifts]

    def paint(axes: Any) -> None:
        axes.imshow(table, cmap=HEAT, vmin=0, vmax=1, interpolation="none", aspect="auto")
        for row, column in np.ndindex(*table.shape):
            value = table[row, column]
            # These colours are for the cell and not for the page, so neither is the page's ink.
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
        axes.set_xlabel("routes moved by tokens")
        axes.set_ylabel("routes moved by layers")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)

    text = (
        "Agreement of the rollout's routes with the trainer's, when they are moved by some layers and tokens: 1 is the "
        "same experts, 0 is chance. Aligned routes agree most in the middle, where nothing is moved."
    )
    return draw("shifts", "Shift test", text, paint)


def layer_bars(routing: RoutingScores) -> Picture:
    """1 - agreement of each layer, so that the bars start at nothing."""
    groups: list[tuple[str, Role, np.ndarray]] = [
        ("all that differs", "native", 1 - np.array(routing.agreement, float)),
        ("this router alone", "replayed", 1 - np.array(routing.router_alone, float)),
        ("noise", "noise", 1 - np.array(routing.noise, float)),
    ]
    groups = [group for group in groups if np.isfinite(group[2]).any()]
    text = (
        "The share of tokens that a layer's router sends to other experts than the rollout did (1 - agreement): by "
        "itself; while all layers before it replay; and between two passes of the trainer (noise)."
    )
    return draw(
        "agreement-bars",
        "Routers that choose otherwise, by layer",
        text,
        lambda axes: paint_bars(axes, groups, routing.layers, "layer"),
    )


def differing_bars(routing: RoutingScores) -> Picture:
    """Tokens by the number of their routers that differ."""
    counts = np.array(routing.differing, float)
    last = int(np.flatnonzero(counts).max()) + 1
    shares = counts[:last] / counts.sum()
    text = "The share of tokens for which that many routers choose otherwise than in the rollout. 0: none does."
    return draw(
        "differing",
        "Differing routers of a token",
        text,
        lambda axes: paint_bars(axes, [("", "native", shares)], range(last), "routers that differ"),
    )


def _power(edge: float) -> str:
    exponent = round(np.log10(abs(edge)))
    size = "1" if exponent == 0 else f"1e{exponent}"
    return f"-{size}" if edge < 0 else size
