"""The real vLLM on a GPU with CUDA graphs: our capture, vLLM's own and the routers of Transformers agree.

Every engine has `capture="checked"`, which raises unless our routes and vLLM's own are the same, bit for bit. Against
Transformers a share of the choices is asserted: the kernels round differently, which decides between close scores.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.rollout.types import Sample, SamplingParams
from moe_replay.rollout.weights import checkpoint_tensors
from tests.gpu.models import FAMILIES, VOCABULARY, random_model

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.engine]

CASES = [(family, "bfloat16") for family in FAMILIES] + [("qwen3_moe", "float32"), ("mixtral", "float32")]
AGREEMENT = {"bfloat16": 0.9, "float32": 0.995}
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2**30,
    "capture": "checked",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32]},
}


class Case:
    """One engine and its model."""

    def __init__(self, family: str, dtype: str, folder: Path) -> None:
        from moe_replay.rollout.vllm import VllmEngine

        self.family, self.dtype = family, dtype
        self.model = self.load(seed=0)
        self.model.save_pretrained(folder)
        self.engine = VllmEngine(folder, dtype=dtype, **OPTIONS)

    def load(self, seed: int) -> Any:
        """A model of this case on the GPU."""
        return random_model(self.family, getattr(torch, self.dtype), seed).cuda()

    def agreement(self, samples: list[Sample], model: Any) -> float:
        """Share of the choices that the model's own routers make as well, as sets."""
        replay = mr.attach(model)
        same = total = 0
        for sample in samples:
            ids = sample.trace.token_ids
            with torch.no_grad(), replay.record() as recording:
                model(input_ids=torch.tensor(ids[None], dtype=torch.long, device="cuda"), use_cache=False)
            own = recording.traces(mr.TokenLayout.padded([len(ids)]), [ids])[0]
            assert sample.trace.layers == own.layers
            assert sample.trace.valid[:-1].all()
            equal = np.sort(sample.trace.experts[:-1], -1) == np.sort(own.experts[:-1], -1)
            same, total = same + int(equal.sum()), total + equal.size
        replay.detach()
        return same / total


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    pytest.importorskip("vllm")
    case = Case(*request.param, tmp_path_factory.mktemp("model"))
    yield case
    case.engine.close()
    del case
    gc.collect()
    torch.cuda.empty_cache()


def sampled(case: Case, params: SamplingParams, seed: int = 0) -> list[Sample]:
    random = np.random.default_rng(seed)
    shared = random.integers(2, VOCABULARY, 40).tolist()  # a prefix that the cache holds after the first prompt
    prompts = [[*shared, *random.integers(2, VOCABULARY, random.integers(1, 60)).tolist()] for _ in range(12)]
    return [sample for group in case.engine.generate(prompts, params) for sample in group]


def test_routes_are_those_of_the_model(case: Case) -> None:
    samples = sampled(case, SamplingParams(n=2, max_tokens=48, ignore_eos=True))
    assert [len(sample.completion_ids) for sample in samples] == [48] * 24
    assert case.agreement(samples, case.model) >= AGREEMENT[case.dtype]
    other = case.load(seed=1)
    assert case.agreement(samples, other) < 0.7  # the measure can fail


def test_routes_follow_an_update_of_the_weights(case: Case) -> None:
    new = case.load(seed=1)
    case.engine.update_weights(((name, tensor.cpu()) for name, tensor in checkpoint_tensors(new)), version=1)
    samples = sampled(case, SamplingParams(max_tokens=24, ignore_eos=True), seed=1)
    assert {sample.weight_version for sample in samples} == {1}
    assert case.agreement(samples, new) >= AGREEMENT[case.dtype]
