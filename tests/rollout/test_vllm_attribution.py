"""The attribution of the real vLLM and Transformers on the same weights, and on routers that have moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import moe_replay as mr
from moe_replay.rollout.types import SamplingParams
from moe_replay.tools.attribution.measure import attribute
from moe_replay.tools.attribution.result import NATIVE, R3
from tests.models import perturb_routers
from tests.rollout.tiny import VOCABULARY, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]


def test_replay_repairs_what_routing_breaks(vllm_engine: Callable[[str], Any]) -> None:
    engine, model = vllm_engine("olmoe"), tiny_model("olmoe")
    prompts = np.random.default_rng(0).integers(1, VOCABULARY, (8, 12)).tolist()
    groups = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0.8))
    samples = [sample for group in groups for sample in group]

    same = attribute(model, samples, temperature=0.8)
    assert same.failures() == []
    assert same.alignment.status == "aligned"
    assert same.passes[R3].mismatch["k3_kl"] < 1e-8

    replay = mr.attach(model)
    perturb_routers(replay, scale=0.02)
    moved = attribute(model, samples, replay=replay, temperature=0.8)
    assert moved.routing.overall < same.routing.overall
    assert moved.passes[NATIVE].mismatch["k3_kl"] > 30 * moved.passes[R3].mismatch["k3_kl"]
