"""The real vLLM with tensor, expert and data parallelism on CPU: routes, log-probs and updates of all its workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moe_replay.errors import EngineError, EngineOptionError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe
from tests.combinations import with_thorough
from tests.engines.tiny import VOCABULARY, assert_sampled_from, reference, tiny_model
from tests.real_vllm.conftest import NEEDS_VLLM, SHARED

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2-ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "tp2": {"tensor_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "tp2-dp2-ep": {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
}
RARE = ("tp2-ep", "tp2", "dp2", "tp2-dp2-ep")
PROBE = list(range(1, 60))


def changed_model() -> nn.Module:
    model = tiny_model("qwen3_moe")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def probe(model: nn.Module) -> Probe:
    return Probe(token_ids=PROBE, logprobs=reference(model, np.array(PROBE)).logprobs, tolerance=1e-3)


def prompts(number: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(1, VOCABULARY, random.integers(1, 41)).tolist() for _ in range(number)]


@pytest.fixture(params=with_thorough(LAYOUTS, RARE))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from moe_replay.engines.vllm.engine import VllmEngine

    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    with VllmEngine(tmp_path, **SHARED, **LAYOUTS[request.param], capture="kv_slot", max_num_seqs=8) as started:
        yield started


@pytest.mark.whole_runs
def test_all_workers_have_the_routes_and_the_weights(engine: Any) -> None:
    model, params = tiny_model("qwen3_moe"), SamplingParams(n=2, max_tokens=12, temperature=0.7)
    for prompt, group in zip(prompts(6), engine.generate(prompts(6), params), strict=True):
        for sample in group:
            assert sample.prompt_ids.tolist() == prompt
            assert_sampled_from(model, sample, 0.7)

    other = changed_model()
    incomplete = [(name, tensor) for name, tensor in checkpoint_tensors(other) if "experts.3" not in name]
    with pytest.raises(EngineError, match="missing"):
        engine.update_weights(incomplete, 1, probe(other))
    with pytest.raises(EngineError, match="did not succeed"):
        engine.generate(prompts(1), params)

    running: list[list[list[Sample]]] = []
    long = SamplingParams(n=2, max_tokens=200, ignore_eos=True)
    engine.update_weights(checkpoint_tensors(model), 1, probe(model), "one")
    thread = threading.Thread(target=lambda: running.append(engine.generate(prompts(4), long)))
    thread.start()
    while thread.is_alive() and not engine._barrier.active:
        time.sleep(0.01)
    engine.update_weights(checkpoint_tensors(other), 2, probe(other), "two")
    thread.join()
    for group in running[0]:
        for sample in group:
            assert sample.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
            assert (sample.weight_version, sample.weights_id) in ((1, "one"), (2, "two"))
    for group in engine.generate(prompts(6), params):
        for sample in group:
            assert (sample.weight_version, sample.weights_id) == (2, "two")
            assert_sampled_from(other, sample, 0.7)
    with pytest.raises(EngineError, match="does not compute with the weights"):
        engine.update_weights(checkpoint_tensors(other), 3, probe(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, "all run on one machine.*data_parallel_size_local"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, "all run on one machine.*data_parallel_backend"),
        ({"enable_eplb": True}, "moves experts between its workers"),
        (
            {"data_parallel_size": 2, "capture": "vllm"},
            'on CPU supports expert and data.*capture "kv_slot"',
        ),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True, "capture": "vllm"}, 'capture "kv_slot"'),
    ],
)
def test_what_cannot_be_captured_is_refused_before_anything_starts(options: dict[str, Any], message: str) -> None:
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from moe_replay.engines.vllm.engine import VllmEngine

    with pytest.raises(EngineOptionError, match=message):
        VllmEngine("nowhere", **options)
