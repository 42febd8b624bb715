"""Answers that a real SGLang server gave: read here as the client of the engine reads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_replay import MoeTopology, interop
from moe_replay.engines.sglang.wire import GenerateResponse
from moe_replay.errors import EngineName
from moe_replay.weights.identity import CurrentWeights
from tests.real_sglang.models import sglang_model

pytest.importorskip("transformers")

RECORDED = Path(__file__).parents[1] / "engines" / "recorded"


def recorded(name: str) -> tuple[MoeTopology, list[tuple[list[int], int, dict]]]:
    """The model's topology, and prompt, first token and content of each answer."""
    recording = json.loads((RECORDED / f"sglang_{name}.json").read_text())
    topology = MoeTopology.from_config(sglang_model(recording["family"], **recording["changes"]).config)
    answers = []
    for case in recording["cases"].values():
        asked, said = case["request"], case["answer"]
        contents = said if isinstance(said, list) else [said]
        answers += [(asked["input_ids"], asked["routed_experts_start_len"], content) for content in contents]
    return topology, answers


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe"])
def test_as_the_client_reads_them(name: str) -> None:
    topology, answers = recorded(name)
    assert len(answers) > 3
    for prompt, first, content in answers:
        ids = np.array(prompt, np.int32)
        sample = GenerateResponse(content, EngineName("SGLang", "0.5.23"), 0).to_sample(
            ids, topology, lambda _: CurrentWeights(0, None), first
        )
        encoded, tokens = content["meta_info"]["routed_experts"], prompt + content["output_ids"]
        trace = interop.from_sglang(encoded, tokens, topology, first_token=first)
        assert trace == sample.trace
        if not first:
            assert interop.to_sglang(trace, topology) == encoded
            assert interop.from_slime(encoded, tokens, topology) == trace


def test_routes_in_a_dense_layer_are_refused() -> None:
    topology, answers = recorded("qwen3_moe_dense")
    for prompt, first, content in answers:
        tokens = prompt + content["output_ids"]
        with pytest.raises(interop.RouteFormatError, match="no router"):
            interop.from_sglang(content["meta_info"]["routed_experts"], tokens, topology, first_token=first)
