"""The first line of the report of a real run: healthy, or the alignment error that ended it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib", reason="reports have figures")

import moe_replay as mr
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.report.run_report import write_run_report
from moe_replay.train.loop import train

Config = Callable[..., Any]

BATCH = {"prompts_per_step": 8, "max_tokens": 24}


class LateFromStep2(TransformersEngine):
    """Reports the routes of each layer one layer late once it has new weights: all shapes and ids are in order."""

    def _sample(self, prompts: Any, params: Any) -> Any:
        samples = super()._sample(prompts, params)
        if self.weight_version == 0:
            return samples
        return [replace(sample, trace=one_layer_late(sample.trace)) for sample in samples]


def one_layer_late(trace: mr.RouteTrace) -> mr.RouteTrace:
    experts = np.roll(trace.routed_experts, 1, axis=1)
    return mr.RouteTrace(
        trace.token_ids, experts, trace.layers, trace.valid, trace.token_versions[0], num_experts=trace.num_experts
    )


def page_of(run: Path) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", write_run_report(run).read_text())))


def train_with_shifted_routes(config: Config, demo_files: Any, **overrides: Any) -> Path:
    engine = LateFromStep2.from_pretrained(demo_files.model)
    try:
        return train(config(**overrides), engine)
    finally:
        engine.close()


def test_a_run_that_shifted_routes_have_ended_says_so_first(config: Config, demo_files: Any, tmp_path: Path) -> None:
    enough = {"rollout": {**BATCH, "num_generations": 8}, "batch": {"tokens_per_micro_batch": 4096}}
    with pytest.raises(mr.AlignmentError, match="layer"):
        train_with_shifted_routes(config, demo_files, **enough)
    page = page_of(tmp_path / "run")
    first = page.partition("Look at this first: ")[2].partition(" R3: ")[0]
    assert first.startswith(
        "The run failed after step 1: the rollout's routes are not those of the tokens they are used for"
    )
    assert "Healthy" not in page


def test_a_run_of_too_few_tokens_to_end_warns_of_shifted_routes(config: Config, demo_files: Any) -> None:
    # Each step tests one micro-batch, and one with shared prompts has enough samples to end the run.
    few = {"rollout": BATCH, "batch": {"share_prompts": False}}
    page = page_of(train_with_shifted_routes(config, demo_files, **few))
    assert re.search(
        r"Look at this first: Route agreement is below 80% in 2 layers; the lowest is layer \d with \d", page
    )
    assert "Healthy" not in page


def test_a_healthy_run_has_no_warning(config: Config) -> None:
    page = page_of(train(config(rollout=BATCH)))
    assert "Healthy: routes aligned in all 3 steps with enough tokens to tell, no update skipped" in page
    assert "Look at this first" not in page
    assert "Warnings" not in page
