"""What is done to numbers before they are drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moe_replay.report.page import describe_change, figures_of_half_width, format_metric, format_number, format_percent
from moe_replay.report.plots import MAX_POINTS, Curve, downsample, moving_average, plot_curves
from moe_replay.report.record import Series, collect_series


def test_lines_become_series_with_null_as_nan_and_absence_as_absence() -> None:
    found = collect_series(
        [{"step": 1, "time": 5.0, "a": 1}, {"step": 2, "a": None, "b": 3.0, "c": "text"}, {"step": 4, "a": 2}]
    )
    assert set(found) == {"a", "b"}
    np.testing.assert_array_equal(found["a"].steps, [1, 2, 4])
    np.testing.assert_array_equal(found["a"].values, [1, math.nan, 2])
    np.testing.assert_array_equal(found["b"].steps, [2])


def test_steps_that_were_done_again_count_once() -> None:
    found = collect_series([{"step": 2, "a": 1.0}, {"step": 1, "a": 0.0}, {"step": 2, "a": 5.0}])
    np.testing.assert_array_equal(found["a"].values, [0.0, 5.0])


def test_the_end_of_a_series_is_its_last_tenth() -> None:
    assert Series(np.arange(30), np.arange(30.0)).end == 28.0
    assert Series(np.arange(3), np.array([1.0, 2.0, 5.0])).end == 5.0
    assert math.isnan(Series(np.arange(1), np.array([math.nan])).end)


def test_the_start_is_as_long_as_the_end() -> None:
    series = Series(np.arange(30), np.arange(30.0))
    assert (series.tenth, series.start, series.median) == (3, 1.0, 14.5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mismatch/rollout_vs_old/ess", "25%"),
        ("routing/agreement/layer_003", "25%"),
        ("routing/agreement", "25%"),
        ("mismatch/rollout_vs_old/frac_ratio_gt2", "25%"),
        ("reward/accuracy", "0.25"),
        ("loss/total", "0.25"),
    ],
)
def test_fractions_are_in_percent_and_rewards_are_not(name: str, text: str) -> None:
    assert format_metric(name, 0.25) == text


@pytest.mark.parametrize("count", range(1, 20))
def test_no_figure_is_alone_in_a_row_of_three(count: int) -> None:
    halves = figures_of_half_width(count)
    thirds = count - halves
    assert thirds % 3 == 0
    assert halves % 2 == 0 or count == 1


@pytest.mark.parametrize(
    ("values", "settings", "mark"),
    [
        ([0.9996, 0.9999, 1.0004], {}, 1.0),
        ([1.02, 1.3, 1.7], {"log": True}, 1.0),
        ([0.96, 0.97], {"percent": True}, 1.0),
        ([3.0, 5.0], {}, 0.0),
    ],
)
def test_the_value_that_means_something_has_a_tick(values: list[float], settings: dict, mark: float) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    axes = figure.Figure().subplots()
    plot_curves(axes, [Curve(Series(np.arange(len(values)), np.array(values)))], mark=mark, **settings)
    assert mark in axes.get_yticks()
    low, high = axes.get_ylim()
    assert low <= mark <= high


def test_thinning_keeps_the_mean_and_the_range_of_steps() -> None:
    chance = np.random.default_rng(0)
    steps, values = downsample(Series(np.arange(MAX_POINTS * 3), chance.random(MAX_POINTS * 3)))
    assert len(steps) == len(values) == MAX_POINTS
    np.testing.assert_allclose(steps, 3 * np.arange(MAX_POINTS) + 1)
    again = np.random.default_rng(0).random(MAX_POINTS * 3)
    np.testing.assert_allclose(values, again.reshape(-1, 3).mean(1))


def test_a_moving_average_leaves_out_what_is_no_number() -> None:
    values = np.array([1.0, math.nan, 3.0, 5.0])
    np.testing.assert_allclose(moving_average(values, 3), [1.0, 2.0, 4.0, 4.0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05, "0.05"),
        (1.23456, "1.23"),
        (12345.6, "12,346"),
        (4.2e-5, "4.2e-5"),
        (math.nan, "-"),
        (-2e6, "-2.0e6"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert format_number(value) == text


def test_shares_are_in_percent() -> None:
    assert format_percent(0.98765) == "98.77%"
    assert format_percent(math.nan) == "-"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (9.0, 1.0, "9 times lower"),
        (1.0, 1.05, "about the same"),
        (1.0, 3.0, "3 times higher"),
        (2.0, 0.0, "down to exactly 0"),
    ],
)
def test_how_much_less(before: float, after: float, text: str) -> None:
    assert describe_change(before, after) == text
