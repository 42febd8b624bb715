"""The study of training arms: its statistics against known values, its table and figure, one arm of each kind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("matplotlib")
pytest.importorskip("peft")

from experiments import large, results, training
from experiments.arms import Arm
from experiments.results import Result
from experiments.runs import run_arms
from experiments.scales import TINY_LONG
from experiments.study import draw
from experiments.training import CONDITIONS, OUTCOME, SEEDS, STUDY, Comparison, arm_of, compared, fisher, holm


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (4, 2.7764), (9, 2.2622), (30, 2.0423)])
def test_quantiles_of_students_distribution(degrees: int, quantile: float) -> None:
    assert training.t_quantile(degrees) == pytest.approx(quantile, rel=1e-4)
    assert training.two_sided_p(quantile, degrees) == pytest.approx(0.05, rel=1e-3)
    assert training.two_sided_p(0.0, degrees) == pytest.approx(1)


def test_fishers_test_and_holms_correction() -> None:
    assert fisher((0, 5), (5, 5)) == pytest.approx(2 / math.comb(10, 5))
    assert fisher((3, 4), (1, 4)) == pytest.approx(0.485714, abs=1e-6)
    assert fisher((2, 5), (2, 5)) == pytest.approx(1)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    corrected = holm([0.5, math.nan, 0.9])
    assert corrected[0] == corrected[2] == 1
    assert math.isnan(corrected[1])


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.10, 0.12, 0.11, 0.09, 0.10], "helps"),
        ([-0.10, -0.12, -0.11, -0.09, -0.10], "harms"),
        ([0.01, -0.01, 0.005, 0.0, -0.005], "no difference that matters"),
        ([0.3, -0.2, 0.1, -0.3, 0.2], "undecided"),
        ([0.5], "too few pairs"),
        ([], "too few pairs"),
        ([0.2, math.nan], "too few pairs"),
    ],
)
def test_verdicts_follow_the_plan(differences: list[float], verdict: str) -> None:
    assert Comparison.of(differences).verdict == verdict


def result_of(arm: Arm, accuracy: float, reward: list[float]) -> Result:
    evaluations = np.array([math.nan, accuracy, math.nan])
    return Result(arm, 3, 3, {"reward/mean": np.array(reward), OUTCOME: evaluations})


def test_arms_are_compared_in_pairs_of_a_seed(tmp_path: Path) -> None:
    condition = CONDITIONS[0]
    runs = [result_of(arm_of("off", *condition, seed), 0.1 * seed, [0.5] * 3) for seed in SEEDS]
    runs += [
        result_of(arm_of("R3", *condition, seed), 0.1 * seed + 0.05 + 0.001 * seed, [0.5] * 3) for seed in SEEDS[1:]
    ]
    compare = compared(runs, condition, "R3", "off")
    assert compare.pairs == 4  # seed 0 has one side only
    assert compare.mean == pytest.approx(0.0525)
    assert compare.verdict == "helps"
    head, row = STUDY.table(runs)
    assert len(head) == len(row)
    assert row[:2] == list(condition)
    assert row[head.index("verdict")] == "helps"
    assert row[head.index("R2 - off")] == "-"
    assert row[head.index("collapsed: off, R3, R2")] == "0 of 5, 0 of 4, 0 of 0"
    figure = draw(STUDY, runs, tmp_path).read_text()
    assert draw(STUDY, runs, tmp_path).read_text() == figure
    assert STUDY.table([]) == [head]


def test_collapses_are_counted() -> None:
    condition = CONDITIONS[0]
    steep = [0.8] * 5 + [0.0] * 6
    runs = [result_of(arm_of("off", *condition, seed), 0.1, steep) for seed in (0, 1)]
    assert training.collapses(runs, condition, "off") == (2, 2)
    assert training.collapses(runs, condition, "R3") == (0, 0)


def test_all_arms_of_the_plan_are_there_in_its_order() -> None:
    arms = STUDY.arms
    assert len(arms) == len(set(arms)) == 5 * 2 * 5 * len(SEEDS)
    registered = [arm for arm in arms if arm.policy == "ids"]
    assert list(arms[: len(registered)]) == registered
    assert len(registered) == 30 * len(SEEDS)
    assert [arm.seed for arm in arms[:5]] == list(SEEDS)
    assert {arm.mode for arm in arms[:15]} == {"off", "r2", "r3"}
    assert all(arm.staleness == 4 and not arm.lora for arm in arms[:15])


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.whole_runs
def test_arms_of_both_studies_run(tmp_path: Path) -> None:
    scale = replace(STUDY.scales["cpu"], eval_prompts=2)
    lora = arm_of("R3 within a margin", "staleness 1", "LoRA, frozen routers")
    gates = arm_of("R2 with gate weights", "fresh", "all")
    assert run_arms([lora, gates], scale, "cpu", tmp_path, into=tmp_path / "results")
    assert run_arms([large.STUDY.arms[1]], TINY_LONG, "cpu", tmp_path, into=tmp_path / "large")
    for arm, folder in ((lora, "results"), (gates, "results"), (large.STUDY.arms[1], "large")):
        (result,) = results.read([arm], tmp_path / folder)
        assert result.finished
        assert np.isfinite(result.metrics["mismatch/rollout_vs_train/k3_kl"]).all()
