"""The study of loads of expert-parallel ranks: its table is in the docs, and its parts run on a smaller model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("matplotlib")

from experiments.balance import FIGURE, RESULT, SCALE, draw, measure, table, trained_model, write_traces

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_page_has_the_table_and_the_figure_of_the_result(tmp_path: Path) -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert table(result) in page
    assert f"images/experiments/{FIGURE.name}" in page
    assert FIGURE.stat().st_size < 60_000
    for row in result["loads"]:
        assert row["problem"] or 1 <= row["limit"] <= row["balanced"] <= row["by_tokens"]
    draw(result, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").stat().st_size > 1000


def test_a_smaller_model_is_trained_sampled_and_measured(tmp_path: Path) -> None:
    scale = replace(SCALE, experts=16, layers=2, steps=1, batch_tokens=128, prompts=4, max_tokens=4, asked=(1, 1))
    write_traces(trained_model(tmp_path, scale), tmp_path / "traces.mrt", scale)
    result = measure(tmp_path / "traces.mrt")
    assert result["samples"] == 4 * scale.samples
    measured = [row for row in result["loads"] if not row["problem"]]
    assert {row["ep"] for row in measured} == {8}
    assert len(table(result).splitlines()) == 2 + len(measured)
