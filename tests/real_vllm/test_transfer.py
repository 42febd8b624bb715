"""Transfers of weights to the real vLLM on CPU: what its workers receive, and what they do after a fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_replay.errors import EngineError, MoeReplayError
from moe_replay.records import SamplingParams
from moe_replay.train.config.sections import WeightSyncConfig
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.sync.weight_sync import EngineSync
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.probe import Probe
from tests.engines.tiny import assert_sampled_from, reference, tiny_model
from tests.support.weight_sources import IteratorSource

PROBE = list(range(1, 60))


def send(engine: Any, kind: str, weights: dict[str, Tensor], version: int, probe: Probe | None = None) -> Any:
    sync = EngineSync(WeightSyncConfig(transport=kind, timeout_s=120), torch.device("cpu"))  # type: ignore[arg-type]
    return sync.send(IteratorSource(weights.items), SyncedEngine(engine), version, probe)


def sampled(engine: Any) -> Any:
    """A sample of a prompt of several blocks, whose prefix vLLM caches."""
    ((sample,),) = engine.generate([list(range(1, 81))], SamplingParams(max_tokens=4))
    return sample


@pytest.mark.parametrize("kind", ["ipc", "nccl"])
def test_a_transfer_brings_what_http_brings_and_after_a_fault_nothing_samples(
    vllm_engine: Callable[[str], Any], kind: str
) -> None:
    engine, new = vllm_engine("qwen3_moe"), tiny_model("qwen3_moe", seed=1 if kind == "ipc" else 2)
    weights = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(new)}
    probe = Probe(token_ids=PROBE, logprobs=reference(new, np.array(PROBE)).logprobs, tolerance=1e-3)
    send(engine, "http", weights, 1, probe)
    by_http = engine.prompt_logprobs(PROBE)
    old = tiny_model("qwen3_moe")
    send(engine, "http", dict(checkpoint_tensors(old)), 2)
    assert_sampled_from(old, sampled(engine))  # and its prefix is cached now
    assert send(engine, kind, weights, 3, probe).transport == kind
    assert np.array_equal(engine.prompt_logprobs(PROBE), by_http)
    assert_sampled_from(new, sampled(engine))

    expert = "model.layers.1.mlp.experts.5.up_proj.weight"
    faults = {
        "layers.1.mlp.experts": {name: tensor for name, tensor in weights.items() if name != expert},
        "could not update": weights | {expert: weights[expert][:-1]},
        "nothing": {"model.nothing": weights[expert]} | weights,
    }
    for text, broken in faults.items():
        with pytest.raises(MoeReplayError, match=text):
            send(engine, kind, broken, 4)
        with pytest.raises(EngineError, match="did not succeed"):
            engine.generate([[1]], SamplingParams())
    send(engine, kind, weights, 5, probe)
    (sample,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0]
    assert sample.weight_version == 5
    assert_sampled_from(new, sample)
