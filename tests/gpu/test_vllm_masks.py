"""Sampling masks of the real vLLM on a GPU: over the returned support, Transformers finds vLLM's log-probs."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from moe_replay.engines.vllm.masks import MASK_OPTION
from moe_replay.engines.vllm_serve.client import VllmServeClient
from moe_replay.records import Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe
from tests.gpu.models import VOCABULARY, random_model
from tests.real_vllm.serve import vllm_serve

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.engine]

OPTIONS: dict[str, Any] = {
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2**29,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32]},
}


class Case(NamedTuple):
    """An engine and its model, both in float32."""

    engine: Any
    model: Any


@pytest.fixture(scope="module", params=["engine", "plain server"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs

    if MASK_OPTION not in {field.name for field in dataclasses.fields(AsyncEngineArgs)}:
        pytest.skip("this vLLM returns no sampling masks")
    folder = tmp_path_factory.mktemp("model")
    model = random_model("qwen3_moe", torch.float32, 0).cuda()
    model.save_pretrained(folder)
    with own_engine(folder) if request.param == "engine" else plain_server(folder, model) as engine:
        yield Case(engine, model)
    del model
    gc.collect()
    torch.cuda.empty_cache()


def own_engine(folder: Path) -> Any:
    from moe_replay.engines.vllm.engine import VllmEngine

    return VllmEngine(folder, dtype="float32", max_model_len=256, **OPTIONS, **{MASK_OPTION: True})


@contextmanager
def plain_server(folder: Path, model: Any) -> Iterator[Any]:
    """The client of vLLM's own server."""
    options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", as_text(value))]
    topology = MoeTopology.from_config(model.config)
    with (
        vllm_serve(folder, VOCABULARY, "--return-sampling-mask", *options) as url,
        VllmServeClient(url, topology, vocabulary=VOCABULARY, sampling_mask=True) as engine,
    ):
        yield engine


def as_text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def logits_of(case: Case, sample: Sample, temperature: float) -> torch.Tensor:
    """(C, V) that the completion was sampled from."""
    ids = torch.tensor(sample.trace.token_ids[None], dtype=torch.long, device="cuda")
    with torch.no_grad():
        logits = case.model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return logits.float().cpu() / temperature


def ratios(case: Case, samples: list[Sample], temperature: float, *, masked: bool) -> torch.Tensor:
    """Probabilities of Transformers / those of vLLM, of all sampled tokens."""
    found = []
    for sample in samples:
        logits, mask = logits_of(case, sample, temperature), sample.sampling_mask
        assert mask is not None
        if masked:
            kept = torch.zeros_like(logits, dtype=torch.bool)
            kept[np.repeat(np.arange(len(mask)), mask.counts), torch.from_numpy(mask.token_ids.astype(np.int64))] = True
            logits = logits.masked_fill(~(kept | torch.from_numpy(mask.counts == 0)[:, None]), -torch.inf)
        chosen = torch.from_numpy(sample.completion_ids.astype(np.int64))[:, None]
        scored = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
        found.append((scored - torch.from_numpy(sample.logprobs)).exp())
    return torch.cat(found)


@pytest.mark.parametrize("truncation", [{"top_p": 0.7}, {"top_k": 20}, {"top_p": 0.9, "top_k": 50}])
def test_the_support_is_the_one_that_was_sampled_from(case: Case, truncation: dict[str, Any]) -> None:
    params = SamplingParams(
        n=4, max_tokens=32, temperature=0.8, seed=1, ignore_eos=True, sampling_mask=True, **truncation
    )
    prompts = [np.random.default_rng(seed).integers(2, VOCABULARY, 9 + seed).tolist() for seed in range(6)]
    samples = [sample for group in case.engine.generate(prompts, params) for sample in group]
    with_mask = ratios(case, samples, 0.8, masked=True)
    without = ratios(case, samples, 0.8, masked=False)
    print(f"{truncation}: mean ratio {with_mask.mean():.5f} with the mask, {without.mean():.5f} without")
    # A token in a hundred may be routed otherwise, or be at the edge of the support: the median is exact.
    assert with_mask.median().item() == pytest.approx(1, abs=1e-3)
    assert with_mask.mean().item() == pytest.approx(1, abs=0.02)
    assert without.mean().item() < 0.98


def test_greedy_samples_and_probes_work_beside_masks(case: Case) -> None:
    (greedy,) = case.engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0]
    assert greedy.sampling_mask is None
    assert (logits_of(case, greedy, 1.0).argmax(-1).numpy() == greedy.completion_ids).mean() > 0.8
    tokens = np.random.default_rng(0).integers(2, VOCABULARY, 40).tolist()
    with torch.no_grad():
        logprobs = case.model(input_ids=torch.tensor([tokens], device="cuda")).logits[0, :-1].float().log_softmax(-1)
    expected = logprobs.cpu().gather(-1, torch.tensor(tokens)[1:, None])[:, 0].numpy()
    weights = ((name, tensor.cpu()) for name, tensor in checkpoint_tensors(case.model))
    case.engine.update_weights(weights, 1, Probe(token_ids=tokens, logprobs=expected))
    assert case.engine.weight_version == 1
