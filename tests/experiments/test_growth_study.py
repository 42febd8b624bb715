"""The study of growth: its tables are in the docs, its fit finds an exponent, its parts run on a smaller model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("matplotlib")

from experiments.fault_models import load
from experiments.faults import prompts_of
from experiments.growth import (
    DEPTH,
    POINTS,
    draw,
    fit_of_depth,
    fitted,
    part_of,
    read_results,
    scored,
    tables,
)
from experiments.growth_models import TARGET, WINDOW, Shape, facts_of, prepare
from experiments.study import FIGURES
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import SamplingParams

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "does-it-help.md"
DEPTHS = (4, 8, 16, 32)


def test_the_page_has_the_tables_of_the_results(tmp_path: Path) -> None:
    page, measured = PAGE.read_text(encoding="utf-8"), read_results()
    assert all(table in page for table in tables(measured))
    again = draw(measured, tmp_path)
    assert f"images/experiments/{again.name}" in page
    assert again.stat().st_size > 1000
    assert (FIGURES / again.name).stat().st_size < 100_000


def test_models_of_all_points_have_nearly_the_same_loss() -> None:
    losses = [one["loss"] for point in read_results().values() for one in point]
    assert len({one["sha256"] for one in read_results()["depth-8"]}) > 1
    assert max(losses) < 1.1 * min(losses)


@pytest.mark.parametrize("whole_seeds", [False, True])
def test_a_fit_finds_the_exponent_with_an_interval_around_it(whole_seeds: bool) -> None:
    chance = np.random.default_rng(3)
    values = [[1e-4 * depth**1.5 * np.exp(0.2 * chance.normal()) for _ in range(6)] for depth in DEPTHS]
    fit = fitted(DEPTHS, values, whole_seeds=whole_seeds)
    low, high = fit.interval
    assert low < 1.5 < high
    assert low < fit.exponent < high < low + 1
    assert fit.grows
    assert fit.scale * 16**fit.exponent == pytest.approx(1e-4 * 16**1.5, rel=0.3)


def test_what_does_not_grow_is_not_said_to_grow() -> None:
    chance = np.random.default_rng(3)
    values = [[np.exp(0.2 * chance.normal()) for _ in range(3)] for _ in DEPTHS]
    assert not fitted(DEPTHS, values, whole_seeds=False).grows
    measured = {point.name: [{"k3": value} for value in row] for point, row in zip(DEPTH, values, strict=False)}
    assert fit_of_depth(measured, "k3").interval[0] < 0 < fit_of_depth(measured, "k3").interval[1]


@pytest.mark.slow
def test_a_smaller_model_is_trained_and_scored_by_position(tmp_path: Path) -> None:
    shape = Shape(1, 8, 2)
    folder = prepare(tmp_path, shape, 0, target=5.0)
    facts = facts_of(folder)
    assert (facts["steps"], len(facts["sha256"])) == (WINDOW, 64)
    assert TARGET < facts["loss"] < 5
    assert load(folder).config.num_hidden_layers == 2
    engine = TransformersEngine(load(folder), max_length=128)
    groups = engine.generate(prompts_of(0)[:2], SamplingParams(max_tokens=70, seed=0, ignore_eos=True))
    engine.close()
    samples = [sample for (sample,) in groups]
    edges = (0, 64, 100, 128)
    for sample in samples:
        parts = [part_of(sample, *bin_) for bin_ in pairwise(edges)]
        assert np.concatenate([part.completion_ids for part in parts]).tolist() == sample.completion_ids.tolist()
        assert np.concatenate([part.logprobs for part in parts]).tolist() == sample.logprobs.tolist()
    middle = scored(folder, [part_of(sample, 64, 100) for sample in samples])
    assert middle["tokens"] == 2 * 36
    assert middle["k3"] < 1e-6
    assert {point.name for point in POINTS} >= {"depth-4", "position", "float32"}
