"""Kinds of figures, from plain arrays: curves, a band, stacked areas, a heat map, bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_replay.report.colours import INK, Role, colour
from moe_replay.report.record import Series

MOST_POINTS = 400  # of a curve; more cannot be seen
FEW_POINTS = 25  # up to here every point is marked
LETTERS = 62  # of a line that is as long as a figure is wide
HEAT = "cividis"


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a figure."""

    series: Series
    label: str = ""
    role: Role = "plain"
    style: str = "-"


def drawable(curves: Sequence[Curve]) -> list[Curve]:
    """Those that have something to show."""
    return [curve for curve in curves if len(curve.series.finite)]


def paint_curves(
    axes: Any,
    curves: Sequence[Curve],
    unit: str = "",
    *,
    log: bool = False,
    share: bool = False,
) -> None:
    """Curves over steps; one of many points is drawn faint, with its moving average over it.

    log     on a logarithmic scale, where zero has a place if it occurs
    share   values are shares, labelled in percent
    """
    for curve in curves:
        steps, values = thinned(curve.series)
        look = {"color": colour(curve.role), "linestyle": curve.style}
        label = f" {curve.label}" if curve.label.startswith("_") else curve.label  # else matplotlib would leave it out
        if len(steps) > FEW_POINTS:
            axes.plot(steps, values, alpha=0.35, linewidth=0.9, **look)
            axes.plot(steps, moving_average(values, len(values) // 12 + 1), label=label, **look)
        else:
            axes.plot(steps, values, label=label, marker="o", **look)
    every = np.concatenate([curve.series.finite for curve in curves])
    if log:
        _set_log(axes, every)
    elif share:
        _set_percent(axes, every)
    _finish(axes, "step", unit)
    whole_numbers(axes.xaxis)
    if any(curve.label for curve in curves):
        legend(axes)


def paint_band(axes: Any, middle: Series, low: Series, high: Series, unit: str) -> None:
    """A curve, and the range about it."""
    if len(low.steps) == len(high.steps) and len(low.steps):
        (steps, lowest), (_, highest) = thinned(low), thinned(high)
        steps, lowest, highest = _with_width(steps, lowest, highest)
        axes.fill_between(steps, lowest, highest, color=colour("plain"), alpha=0.18, linewidth=0, label="min to max")
    paint_curves(axes, [Curve(middle, "mean")], unit)


def paint_stack(axes: Any, parts: Sequence[Curve], unit: str) -> None:
    """Areas on top of each other; all parts have the same steps."""
    thin = [thinned(part.series) for part in parts]
    steps, *heights = _with_width(thin[0][0], *(np.nan_to_num(values) for _, values in thin))
    axes.stackplot(
        steps, heights, labels=[p.label for p in parts], colors=[colour(p.role) for p in parts], alpha=0.85, linewidth=0
    )
    axes.margins(x=0)
    _finish(axes, "step", unit)
    whole_numbers(axes.xaxis)
    legend(axes)


def paint_heat(
    axes: Any, values: np.ndarray, rows: Sequence[int], columns: Sequence[float], row_unit: str, column_unit: str
) -> None:
    """Shares (R, C) up to 1, with row 0 below; columns (C + 1,) are the edges on the horizontal axis."""
    known = values[np.isfinite(values)]
    lowest = min(float(known.min()) if len(known) else 0.9, 0.9)
    image = axes.imshow(
        values,
        aspect="auto",
        origin="lower",
        interpolation="none",  # embedded as it is, a pixel for each value
        cmap=HEAT,
        vmin=np.floor(lowest * 20) / 20,
        vmax=1.0,
        extent=(columns[0], columns[-1], -0.5, len(rows) - 0.5),
    )
    shown = _some(len(rows), 9)
    axes.set_yticks(shown, [str(rows[place]) for place in shown])
    _finish(axes, column_unit, row_unit)
    axes.grid(False)
    whole_numbers(axes.xaxis)
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06, format=_percent)
    bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)


def paint_bars(axes: Any, groups: Sequence[tuple[str, Role, np.ndarray]], places: Sequence[int], unit: str) -> None:
    """Bars of several groups (label, role, heights (N,)) side by side at each of N places."""
    width = 0.82 / len(groups)
    at = np.arange(len(places))
    for number, (label, role, heights) in enumerate(groups):
        axes.bar(at + (number + 0.5) * width - 0.41, np.nan_to_num(heights), width, label=label, color=colour(role))
    shown = _some(len(places), 12)
    axes.set_xticks(shown, [str(places[place]) for place in shown])
    _finish(axes, unit, "")
    axes.grid(False, axis="x")
    _set_percent(axes, np.concatenate([heights for _, _, heights in groups]))
    axes.set_ylim(bottom=0)
    if len(groups) > 1:
        legend(axes)


# ---- parts ----------------------------------------------------------------------------------------------------------


def thinned(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of at most MOST_POINTS points; beyond that, each is the mean of neighbours."""
    if len(series.steps) <= MOST_POINTS:
        return series.steps, series.values
    starts = np.linspace(0, len(series.steps), MOST_POINTS, endpoint=False).astype(int)
    counts = np.diff([*starts, len(series.steps)])
    return np.add.reduceat(series.steps, starts) / counts, np.add.reduceat(series.values, starts) / counts


def _with_width(steps: np.ndarray, *values: np.ndarray) -> tuple[np.ndarray, ...]:
    """The same, but for a single step, about which an area is drawn."""
    return (steps, *values) if len(steps) != 1 else (steps + np.array([-0.4, 0.4]), *(np.repeat(v, 2) for v in values))


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Each value's mean with its neighbours that are numbers, fewer of them at both ends."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    total = np.convolve(np.where(known, values, 0.0), kernel, "same")
    count = np.convolve(known.astype(float), kernel, "same")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def legend(axes: Any) -> None:
    """Above the figure, where it hides nothing; in one line where there is room."""
    lengths = [len(label) + 4 for label in axes.get_legend_handles_labels()[1]]
    columns = len(lengths) if sum(lengths) <= LETTERS else max(1, LETTERS // max(lengths))
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        borderaxespad=0.1,
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.0,
    )


def whole_numbers(axis: Any) -> None:
    """Ticks of an axis at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))


def _some(count: int, most: int) -> range:
    """Every so manyth of `count` places, so that they are not more than `most`."""
    return range(0, count, max(1, -(-count // most)))


def _finish(axes: Any, x_label: str, y_label: str) -> None:
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
        else:  # within less than a decade the scale is all but linear
            axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_short)


def _set_percent(axes: Any, values: np.ndarray) -> None:
    known = values[np.isfinite(values)]
    if len(known) and np.ptp(known) < 1e-6:  # a flat line would be magnified to noise
        middle = float(known[0])
        axes.set_ylim(max(-0.0015, middle - 0.05), min(1.0015, max(0.05, middle + 0.05)))
    axes.yaxis.set_major_formatter(_percent)


def _percent(value: float, _: Any = None) -> str:
    return f"{100 * value:.4g}%"


def _short(value: float, _: Any = None) -> str:
    return (
        "0"
        if value == 0
        else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
        if _is_far(value)
        else f"{value:g}"
    )


def _is_far(value: float) -> bool:
    return not 1e-3 <= abs(value) < 1e4


def diagonal(axes: Any, low: float, high: float) -> None:
    """The line on which both axes say the same."""
    axes.plot([low, high], [low, high], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.7)
