"""Figures: colours by meaning, plots of plain arrays, and rendering as SVG for a page and as PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from moe_replay.errors import needs_extra
from moe_replay.report.record import Series

# ---- colours ---------------------------------------------------------------------------------------------------------


Role = Literal[
    "replayed", "native", "noise", "recorded", "plain", "second", "third", "fourth", "fifth", "sixth", "seventh"
]

INK = "#1f2933"  # text and axes; the text colour on a page
INK_ON_DARK = "#e4e8ec"

# role: (on a light background and in PNG files, on a dark background)
COLOURS: dict[Role, tuple[str, str]] = {
    "replayed": ("#0072b2", "#58b4ea"),  # the rollout's routes, replayed (R3)
    "native": ("#d55e00", "#ff9248"),  # the trainer's native routing
    "noise": ("#7c8792", "#9aa5b0"),  # the same pass, repeated
    "recorded": ("#009e73", "#3ecb9f"),  # the trainer's recorded routes, replayed (R2)
    "plain": ("#5b4a9c", "#b3a4ee"),  # anything else
    "second": ("#b0457f", "#ea94c3"),
    "third": ("#a67c00", "#e8c04a"),
    "fourth": ("#46525e", "#b9c3cd"),
    "fifth": ("#2f7d87", "#6fc5d0"),
    "sixth": ("#8c5a3c", "#cf9f82"),
    "seventh": ("#6d8b1f", "#b2d05f"),
}
# In a comparison, colours only identify runs.
RUN_ROLES: tuple[Role, ...] = ("replayed", "native", "recorded", "plain", "third", "second", "fourth")


def colour(role: Role) -> str:
    """Return the colour that matplotlib draws with."""
    return COLOURS[role][0]


def css_variables(*, dark: bool) -> str:
    """Return CSS declarations of all colours, for a light or a dark page."""
    return " ".join(f"--{role}: {shades[dark]};" for role, shades in COLOURS.items())


def use_css_variables(svg: str) -> str:
    """Replace the colours in an SVG by CSS variables, so that it follows the colour scheme of the page."""
    for role, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{role})")
    return svg.replace(INK, "currentColor")


# ---- rendering -------------------------------------------------------------------------------------------------------


WIDTH = 5.0  # inches: about the width of a phone's screen, so that 10 pt text is 10 pt there
PNG_DPI = 200
RASTER_DPI = 160  # of rasterized parts inside the SVG

_STYLE = {
    "svg.fonttype": "none",  # keep text as text: searchable, in the font and colour of the page
    "svg.hashsalt": "moe-replay",
    "font.family": "DejaVu Sans",  # ships with matplotlib, and is wider than page fonts, so no text overflows
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names of runs and rewards may contain dollar signs
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": False,
    "axes.titlesize": 10,
    "axes.unicode_minus": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class RenderedFigure:
    """A finished figure."""

    name: str  # stem of the PNG file, and anchor on the page
    title: str
    caption: str  # explanation below the figure
    svg: str
    png: bytes


def render(
    name: str, title: str, caption: str, plot: Callable[[Any], None], *, height: float = 2.9, panels: int = 1
) -> RenderedFigure:
    """Render a figure; `plot` fills its axes, a list if there are several panels."""
    with needs_extra("figures need matplotlib", "report"):
        import matplotlib
        from matplotlib.figure import Figure

    # Without pyplot no figure stays open and no display is needed.
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        layout = figure.get_layout_engine()
        axes = figure.subplots(1, panels, squeeze=False, sharex=panels > 1, sharey=panels > 1)[0]
        plot(axes[0] if panels == 1 else list(axes))
        _arrange(figure, layout)
        content = io.StringIO()
        figure.savefig(content, format="svg", dpi=RASTER_DPI, metadata={"Date": None})
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.02, ha="left")
        _arrange(figure, layout)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
    return RenderedFigure(name, title, caption, _for_page(content.getvalue(), name), image.getvalue())


def _arrange(figure: Any, layout: Any) -> None:
    """Make room for labels and titles, once: with its layout engine, a figure is drawn twice whenever it is saved."""
    layout.execute(figure)
    figure.set_layout_engine(None)


def _for_page(svg: str, name: str) -> str:
    """Adapt matplotlib's SVG for embedding: scalable, with ids unique on the page and colours as CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\n?", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    head, rest = svg.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None, "matplotlib always writes a viewBox"
    svg = f'<svg viewBox="{box[1]}" role="img" aria-labelledby="title-{name}">{rest}'
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    svg = re.sub(r"\n\s*", "\n", svg)
    return use_css_variables(svg)


# ---- plots -----------------------------------------------------------------------------------------------------------


MAX_POINTS = 400  # of a curve; more cannot be distinguished
MAX_MARKED_POINTS = 25  # curves of at most this many points get markers
LEGEND_WIDTH = 62  # characters that fit on one line across a figure
HEAT = "cividis"


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a plot."""

    series: Series
    label: str = ""
    role: Role = "plain"
    style: str = "-"


def with_data(curves: Sequence[Curve]) -> list[Curve]:
    return [curve for curve in curves if len(curve.series.finite)]


def plot_curves(
    axes: Any,
    curves: Sequence[Curve],
    unit: str = "",
    *,
    log: bool = False,
    percent: bool = False,
    mark: float | None = None,
) -> None:
    """Plot curves over steps; long ones are drawn faint, with their moving average on top.

    log       logarithmic scale, with a linear part around zero if zero occurs
    percent   values are fractions, labelled in percent
    mark      a reference value, such as a ratio of 1, shown with a tick and a line
    """
    for curve in curves:
        steps, values = downsample(curve.series)
        look = {"color": colour(curve.role), "linestyle": curve.style}
        label = f" {curve.label}" if curve.label.startswith("_") else curve.label  # matplotlib hides "_..."
        if len(steps) > MAX_MARKED_POINTS:
            axes.plot(steps, values, alpha=0.35, linewidth=0.9, **look)
            axes.plot(steps, moving_average(values, len(values) // 12 + 1), label=label, **look)
        else:
            axes.plot(steps, values, label=label, marker="o", **look)
    finite = np.concatenate([curve.series.finite for curve in curves])
    if log:
        _set_log(axes, finite)
    elif percent:
        _set_percent(axes, finite)
    _label_axes(axes, "step", unit)
    integer_ticks(axes.xaxis)
    if mark is not None:
        _set_mark(axes, mark, keep_format=log or percent)
    if any(curve.label for curve in curves):
        legend(axes)


def plot_band(axes: Any, middle: Series, low: Series, high: Series, unit: str) -> None:
    if len(low.steps) == len(high.steps) and len(low.steps):
        (steps, lowest), (_, highest) = downsample(low), downsample(high)
        steps, lowest, highest = _widen_single_step(steps, lowest, highest)
        axes.fill_between(steps, lowest, highest, color=colour("plain"), alpha=0.18, linewidth=0, label="min to max")
    plot_curves(axes, [Curve(middle, "mean")], unit)


def plot_stack(axes: Any, parts: Sequence[Curve], unit: str) -> None:
    """Plot stacked areas; all parts have the same steps."""
    thin = [downsample(part.series) for part in parts]
    steps, *heights = _widen_single_step(thin[0][0], *(np.nan_to_num(values) for _, values in thin))
    axes.stackplot(
        steps, heights, labels=[p.label for p in parts], colors=[colour(p.role) for p in parts], alpha=0.85, linewidth=0
    )
    axes.margins(x=0)
    _label_axes(axes, "step", unit)
    integer_ticks(axes.xaxis)
    legend(axes)


def plot_heatmap(
    axes: Any, values: np.ndarray, rows: Sequence[int], columns: Sequence[float], row_unit: str, column_unit: str
) -> None:
    """Plot fractions (R, C) with row 0 at the bottom; `columns` holds the edges on the horizontal axis."""
    finite = values[np.isfinite(values)]
    lowest = min(float(finite.min()) if len(finite) else 0.9, 0.9)
    image = axes.imshow(
        values,
        aspect="auto",
        origin="lower",
        interpolation="none",  # embedded as is, one pixel per value
        cmap=HEAT,
        vmin=np.floor(lowest * 20) / 20,
        vmax=1.0,
        extent=(columns[0], columns[-1], -0.5, len(rows) - 0.5),
    )
    shown = _every_nth(len(rows), 9)
    axes.set_yticks(shown, [str(rows[index]) for index in shown])
    _label_axes(axes, column_unit, row_unit)
    axes.grid(False)
    integer_ticks(axes.xaxis)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06, format=_format_percent)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)


def plot_bars(axes: Any, groups: Sequence[tuple[str, Role, np.ndarray]], ticks: Sequence[int], unit: str) -> None:
    """Plot the bars of several groups (label, role, heights (N,)) side by side at each of N ticks."""
    width = 0.82 / len(groups)
    at = np.arange(len(ticks))
    for group, (label, role, heights) in enumerate(groups):
        axes.bar(at + (group + 0.5) * width - 0.41, np.nan_to_num(heights), width, label=label, color=colour(role))
    shown = _every_nth(len(ticks), 12)
    axes.set_xticks(shown, [str(ticks[index]) for index in shown])
    _label_axes(axes, unit, "")
    axes.grid(False, axis="x")
    _set_percent(axes, np.concatenate([heights for _, _, heights in groups]))
    axes.set_ylim(bottom=0)
    if len(groups) > 1:
        legend(axes)


def curve_figure(
    name: str,
    title: str,
    caption: str,
    curves: list[Curve],
    unit: str = "",
    *,
    log: bool = False,
    percent: bool = False,
    mark: float | None = None,
) -> Iterator[RenderedFigure]:
    shown = with_data(curves)
    if not shown:
        return
    plot = partial(plot_curves, curves=shown, unit=unit, log=log, percent=percent, mark=mark)
    yield render(name, title, caption, plot)


# ---- parts ----------------------------------------------------------------------------------------------------------


def downsample(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) with at most MAX_POINTS points, each the mean of its neighbours where there are more."""
    if len(series.steps) <= MAX_POINTS:
        return series.steps, series.values
    starts = np.linspace(0, len(series.steps), MAX_POINTS, endpoint=False).astype(int)
    counts = np.diff([*starts, len(series.steps)])
    return np.add.reduceat(series.steps, starts) / counts, np.add.reduceat(series.values, starts) / counts


def _widen_single_step(steps: np.ndarray, *values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Widen a single step, so that an area can be drawn around it."""
    return (steps, *values) if len(steps) != 1 else (steps + np.array([-0.4, 0.4]), *(np.repeat(v, 2) for v in values))


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred moving average over finite values, with shorter windows at both ends."""
    is_finite = np.isfinite(values)
    kernel = np.ones(window)
    total = np.convolve(np.where(is_finite, values, 0.0), kernel, "same")
    count = np.convolve(is_finite.astype(float), kernel, "same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def legend(axes: Any) -> None:
    """Place the legend above the axes, on one line if it fits."""
    lengths = [len(label) + 4 for label in axes.get_legend_handles_labels()[1]]
    columns = len(lengths) if sum(lengths) <= LEGEND_WIDTH else max(1, LEGEND_WIDTH // max(lengths))
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0.1,
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.0,
    )


def integer_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def _every_nth(count: int, most: int) -> range:
    """Return evenly spaced indices below `count`, at most `most` of them."""
    return range(0, count, max(1, -(-count // most)))


def _label_axes(axes: Any, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True)


def _set_log(axes: Any, values: np.ndarray) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, SymmetricalLogLocator

    positive = values[values > 0]
    if not len(positive):
        return
    if (values <= 0).any():
        axes.set_yscale("symlog", linthresh=float(positive.min()), linscale=0.5)
        axes.set_ylim(bottom=0 if (values >= 0).all() else None)
        locator = SymmetricalLogLocator(base=10, linthresh=float(positive.min()))
        locator.set_params(numticks=6)
        axes.yaxis.set_major_locator(locator)
    else:
        axes.set_yscale("log")
        spread = positive.max() / positive.min()
        if spread > 8:
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if spread > 100 else (1.0, 2.0, 5.0), numticks=7))
        else:  # within less than a decade the scale is nearly linear
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_format_log_tick)


def _set_mark(axes: Any, value: float, *, keep_format: bool) -> None:
    """Draw a line and a tick at a value, without the ticks whose labels would touch it."""
    axes.axhline(value, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.6)
    low, high = sorted(axes.get_ylim())
    to_axes = axes.yaxis.get_transform().transform
    length = float(np.ptp(to_axes(np.array([low, high]))))
    near = [abs(float(to_axes(np.array([tick]))[0] - to_axes(np.array([value]))[0])) for tick in axes.get_yticks()]
    others = [
        tick
        for tick, distance in zip(axes.get_yticks(), near, strict=True)
        if low <= tick <= high and distance > 0.08 * length
    ]
    axes.set_yticks(sorted([*others, value]))
    if not keep_format:
        axes.yaxis.set_major_formatter(lambda tick, _: f"{tick:.6g}")


def _set_percent(axes: Any, values: np.ndarray) -> None:
    finite = values[np.isfinite(values)]
    if len(finite) and np.ptp(finite) < 1e-6:  # autoscaling would magnify a flat line to noise
        middle = float(finite[0])
        axes.set_ylim(max(-0.0015, middle - 0.05), min(1.0015, max(0.05, middle + 0.05)))
    axes.yaxis.set_major_formatter(_format_percent)


def _format_percent(value: float, _: Any = None) -> str:
    return f"{100 * value:.4g}%"


def _format_log_tick(value: float, _: Any = None) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:g}"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def plot_diagonal(axes: Any, low: float, high: float) -> None:
    """Plot the line on which both axes are equal."""
    axes.plot([low, high], [low, high], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.7)
