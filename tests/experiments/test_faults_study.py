"""The study of fault signatures: its tables are in the docs, and its parts run on a smaller model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("peft")

from experiments.fault_models import SCALE, VARIANTS, load, prepare
from experiments.faults import (
    HELD_OUT,
    measured_arm,
    planted,
    prompts_of,
    read_result,
    rows_of_catches,
    rows_of_gate,
    rows_of_numbers,
)
from experiments.study import table_text
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import SamplingParams
from tests.verification.faults import GALLERY

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "does-it-help.md"


def test_the_page_has_the_tables_of_the_result() -> None:
    page, measured = PAGE.read_text(encoding="utf-8"), read_result()
    assert len(measured) >= 5
    assert table_text(rows_of_catches(measured)) in page
    assert table_text(rows_of_numbers(measured)) in page


def test_the_gate_passes_healthy_models_that_it_was_not_made_with_and_fails_as_the_page_says() -> None:
    _, *rows = rows_of_gate(read_result(HELD_OUT))
    failed = {name: count for name, _, count, _ in rows}
    passed = {name for name, count in failed.items() if count == "0"}
    healthy = {name for name in failed if name.startswith("healthy")}
    assert len(healthy) == 3
    assert passed == healthy | {"old weights, one update", "router in bfloat16 on the wire, else float32"}
    named = {name: fault for name, _, _, fault in rows}
    assert "prefix cache" in named["prefix cache kept over a sync"]
    assert "top-p" in named["top-p without its mask"]
    assert "slice" in named["expert-parallel slice of another rank"]
    assert "adapter" in named["LoRA ignored by the engine"]
    assert "retracted" in named["retracted, old log-probs kept"]
    assert "token shift" in named["rows of the next token"]


@pytest.mark.slow
def test_a_smaller_model_is_trained_spoilt_and_measured(tmp_path: Path) -> None:
    scale = replace(SCALE, steps=2, batch_tokens=128)
    folder = prepare(tmp_path, 0, scale)
    assert {path.name for path in folder.iterdir()} == set(VARIANTS)
    models = {name: dict(load(folder / name).named_parameters()) for name in VARIANTS}
    after = models.pop("after")
    assert all(any(not weight.equal(after[name]) for name, weight in other.items()) for other in models.values())

    model = load(folder / "after")
    engine = TransformersEngine(model, max_length=128)
    groups = engine.generate(prompts_of(0)[:4], SamplingParams(max_tokens=48, seed=0, ignore_eos=True))
    engine.close()
    samples = [sample for (sample,) in groups]
    assert measured_arm(model, samples)["k3"] < 1e-6
    spoilt = dict(planted(samples))
    assert spoilt.keys() == {fault.name.replace("_", " ") for fault in GALLERY}
    late = measured_arm(model, spoilt["rows of the next token"])
    assert np.isfinite(late["k3"])
    assert late["worst_layer"] < 0.9
    assert measured_arm(model, spoilt["physical ids of redundant experts"]) == {"refused": "AlignmentError"}
