"""Plots of plain arrays: curves, a band, stacked areas, a heat map, bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_replay.report.colours import INK, Role, colour
from moe_replay.report.record import Series

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
    """Return the curves with at least one finite value."""
    return [curve for curve in curves if len(curve.series.finite)]


def plot_curves(
    axes: Any,
    curves: Sequence[Curve],
    unit: str = "",
    *,
    log: bool = False,
    share: bool = False,
    mark: float | None = None,
) -> None:
    """Plot curves over steps; long ones are drawn faint, with their moving average on top.

    log     logarithmic scale, with a linear part around zero if zero occurs
    share   values are fractions, labelled in percent
    mark    the value that means something, such as a ratio of 1: it is on the axis, with a tick and a line
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
    every = np.concatenate([curve.series.finite for curve in curves])
    if log:
        _set_log(axes, every)
    elif share:
        _set_percent(axes, every)
    _label_axes(axes, "step", unit)
    integer_ticks(axes.xaxis)
    if mark is not None:
        _set_mark(axes, mark, keep_format=log or share)
    if any(curve.label for curve in curves):
        legend(axes)


def plot_band(axes: Any, middle: Series, low: Series, high: Series, unit: str) -> None:
    """Plot a curve and the range around it."""
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
    known = values[np.isfinite(values)]
    lowest = min(float(known.min()) if len(known) else 0.9, 0.9)
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


# ---- parts ----------------------------------------------------------------------------------------------------------


def downsample(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) with at most MAX_POINTS points, each the mean of its neighbours where there are more."""
    if len(series.steps) <= MAX_POINTS:
        return series.steps, series.values
    starts = np.linspace(0, len(series.steps), MAX_POINTS, endpoint=False).astype(int)
    counts = np.diff([*starts, len(series.steps)])
    return np.add.reduceat(series.steps, starts) / counts, np.add.reduceat(series.values, starts) / counts


def _widen_single_step(steps: np.ndarray, *values: np.ndarray) -> tuple[np.ndarray, ...]:
    """Give a single step some width, so that an area can be drawn around it."""
    return (steps, *values) if len(steps) != 1 else (steps + np.array([-0.4, 0.4]), *(np.repeat(v, 2) for v in values))


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred moving average over finite values, with shorter windows at both ends."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    total = np.convolve(np.where(known, values, 0.0), kernel, "same")
    count = np.convolve(known.astype(float), kernel, "same")
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
    """Restrict the ticks of an axis to integers."""
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
    """Draw a line at a value, with its own tick; ticks so near that their labels would touch are left out."""
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
    known = values[np.isfinite(values)]
    if len(known) and np.ptp(known) < 1e-6:  # autoscaling would magnify a flat line to noise
        middle = float(known[0])
        axes.set_ylim(max(-0.0015, middle - 0.05), min(1.0015, max(0.05, middle + 0.05)))
    axes.yaxis.set_major_formatter(_format_percent)


def _format_percent(value: float, _: Any = None) -> str:
    return f"{100 * value:.4g}%"


def _format_log_tick(value: float, _: Any = None) -> str:
    return (
        "0"
        if value == 0
        else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
        if _is_far(value)
        else f"{value:g}"
    )


def _is_far(value: float) -> bool:
    return not 1e-3 <= abs(value) < 1e4


def plot_diagonal(axes: Any, low: float, high: float) -> None:
    """Plot the line on which both axes are equal."""
    axes.plot([low, high], [low, high], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.7)
