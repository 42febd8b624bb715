"""What a run draws follows from its seed, and a run resumes on the data that it was trained on alone."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.policy import save_random_state

pytest.importorskip("transformers")

from moe_replay.train.backends.fsdp_loading import sharded_model
from moe_replay.train.checkpoint import rng
from moe_replay.train.checkpoint.checkpoint import CheckpointError
from moe_replay.train.config.sections import ModelConfig
from moe_replay.train.loop import train
from moe_replay.train.rollout.prompts import Rows, read_rows
from moe_replay.train.setup import launch
from tests.models import tiny_qwen3_moe
from tests.train.runs import tiny_config

CPU = torch.device("cpu")


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), np.random.randn(), random.random(), random.gauss(0, 1)]


def test_one_seed_draws_the_same_from_every_generator() -> None:
    rng.seed(7)
    first = draws()
    rng.seed(7)
    assert draws() == first
    rng.seed(8)
    assert not set(draws()) & set(first)
    rng.seed(2**62)  # more than numpy's own seeds


def test_every_generator_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    rng.seed(7)
    draws()  # the second normal number of a pair is kept for the next call
    save_random_state(tmp_path, CPU)
    expected = draws()
    rng.seed(8)
    rng.load(tmp_path, CPU)
    assert draws() == expected


def test_adapters_are_equal_for_one_seed(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tiny_qwen3_moe().save_pretrained(tmp_path)
    settings = ModelConfig(dtype="float32", lora_rank=2)
    adapters = []
    with launch.process_group(CPU):
        for seed in (3, 3, 4):
            torch.rand(len(adapters))
            rng.seed(seed)
            model = sharded_model(str(tmp_path), settings, CPU, trained=True)
            adapters.append(
                torch.cat([p.full_tensor().flatten() for n, p in model.named_parameters() if "lora_A" in n])
            )
    assert torch.equal(adapters[0], adapters[1])
    assert not torch.equal(adapters[0], adapters[2])


# ---- data ------------------------------------------------------------------------------------------------------------


def identity(*rows: dict[str, Any]) -> str:
    return Rows(rows, Path("data.jsonl")).identity


def test_the_identity_of_rows_is_their_content_in_order() -> None:
    one, two = {"prompt": "a", "n": 1}, {"prompt": "b", "n": [1, {"x": None}]}
    assert identity(one, two) == identity({"n": 1, "prompt": "a"}, dict(two))
    others = [identity(two, one), identity(one), identity(one, two, two), identity(one, two | {"n": 2})]
    assert len({identity(one, two), *others}) == 5
    assert identity(one, two).startswith("2 rows with digest ")


def test_values_that_json_lacks_count_too_but_not_by_their_address() -> None:
    assert identity({"a": datetime.date(2026, 1, 1)}) != identity({"a": datetime.date(2026, 1, 2)})
    assert identity({"a": b"1"}) != identity({"a": b"2"})
    assert identity({"a": object()}) == identity({"a": object()})
    assert identity({"a": "\ud800"}) != identity({"a": "\ud801"})


@pytest.fixture
def run(demo_files: Any, tmp_path: Path) -> Callable[..., Path]:
    """Train on a copy of the data, of so many rows."""

    def run(rows: int, steps: int, **overrides: Any) -> Path:
        prompts = tmp_path / "prompts.jsonl"
        lines = [json.dumps(row) + "\n" for row in read_rows(demo_files.train)[:rows]]
        prompts.write_text("".join(lines))
        small = {"rollout": {"prompts_per_step": 2, "num_generations": 2}, "replay": {"score_native_every": 0}}
        return train(tiny_config(demo_files.model, prompts, tmp_path / "run", steps=steps, **small, **overrides))

    return run


def test_a_run_resumes_on_its_own_rows_alone(run: Callable[..., Path]) -> None:
    run(rows=20, steps=1)
    with pytest.raises(CheckpointError, match=r"expected data 19 rows with digest \w+, found data 20 rows with digest"):
        run(rows=19, steps=2)
    folder = run(rows=20, steps=2)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
