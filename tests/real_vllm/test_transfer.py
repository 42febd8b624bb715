"""Transfers of weights to the real vLLM on CPU: what its workers receive, and what they do after a fault."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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
from moe_replay.weights.identity import Probe
from moe_replay.weights.source import HandedGroup
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


class InRows(IteratorSource):
    """Hands over fused experts in two parts, one after the other, as the ranks of expert parallelism do."""

    def owners(self) -> tuple[int, ...]:
        return (0,)

    def owned_groups(
        self, receivers: Collection[int], copies: Callable[[int], Collection[int]], *, parts: bool
    ) -> Iterator[HandedGroup]:
        assert parts
        for group in self.groups(receivers):
            fused = [(name, tensor) for name, tensor in group if ".experts." in name]
            yield HandedGroup(None, [item for item in group if ".experts." not in item[0]], {})
            for begin, end in (0, 1), (1, 4):
                tensors = [(name, tensor[begin:end].contiguous()) for name, tensor in fused]
                yield HandedGroup(0, tensors, {name: (begin, len(tensor)) for name, tensor in fused})


def test_rows_of_gpt_oss_become_the_experts_of_the_real_model(vllm_engine: Callable[[str], Any]) -> None:
    """vLLM's loader of gpt-oss takes tensors of all experts: the worker puts the rows of each rank together first."""
    engine, models = vllm_engine("gpt_oss"), [tiny_model("gpt_oss", seed=seed) for seed in (1, 2)]
    new, other = ({name: tensor.detach().clone() for name, tensor in checkpoint_tensors(one)} for one in models)
    send(engine, "http", new, 1)
    by_http = engine.prompt_logprobs(PROBE)
    expected = reference(models[0], np.array(PROBE)).logprobs
    assert np.median(np.abs(by_http - expected)) < 0.03  # in bfloat16, where a router may choose another expert
    for version, kind in enumerate(("ipc", "nccl"), 1):
        send(engine, "http", other, 2 * version)
        assert np.abs(engine.prompt_logprobs(PROBE) - by_http).max() > 0.5
        sync = EngineSync(WeightSyncConfig(transport=kind, timeout_s=120), torch.device("cpu"))  # type: ignore[arg-type]
        report = sync.send(InRows(new.items), SyncedEngine(engine), 2 * version + 1, None)
        assert (report.transport, report.nbytes) == (kind, sum(tensor.nbytes for tensor in new.values()))
        assert np.array_equal(engine.prompt_logprobs(PROBE), by_http)
