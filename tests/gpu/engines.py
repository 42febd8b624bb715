"""The real vLLM with a random model on a GPU, and how far its samples are those of Transformers.

`MOE_REPLAY_TRY_ON_CPU=1` runs the tests of this folder on a CPU in float32, to try the tests themselves.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.records import Sample, SamplingParams
from moe_replay.routes.trace import RouteTrace
from moe_replay.weights.identity import Probe
from tests.gpu.models import VOCABULARY, random_model

ON_CPU = bool(os.environ.get("MOE_REPLAY_TRY_ON_CPU"))
DEVICE = "cpu" if ON_CPU else "cuda"
NEEDS_GPU = [
    pytest.mark.skipif(not (ON_CPU or torch.cuda.is_available()), reason="needs a CUDA device"),
    pytest.mark.engine,
]
BLOCK = 32 if ON_CPU else 16
FEW_SLOTS = 1280  # of the KV cache: too few for a dozen sequences of 200 tokens
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 128,  # longer prompts are prefilled in chunks
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 2**28,
    "capture": "cross_check",  # routes of vLLM's own capture and of ours must be the same in every sample, bit for bit
}
ON_GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32]},
}


class Tolerance(NamedTuple):
    """What rounding may do: kernels round differently, which decides between experts of close scores.

    agreement   share of choices that Transformers makes as well, at least
    logprobs    median difference, at most
    """

    agreement: float
    logprobs: float


TOLERANCES = {"bfloat16": Tolerance(0.85, 0.25), "float32": Tolerance(0.99, 0.01)}


class Found(NamedTuple):
    """How far samples are those of a model; `differing`: the median difference of log-probs."""

    agreement: float
    differing: float


class Case:
    """One engine and the model whose weights it has.

    model     its weights in Transformers
    sleeps    the engine was started with sleep mode
    preempts  it has so few slots in its KV cache that sequences are preempted
    """

    def __init__(
        self, family: str, dtype: str, folder: Path, *, complete: Callable[[Path], None] | None = None, **options: Any
    ) -> None:
        """Start the engine with the model in `folder`, to which `complete` may add."""
        from benchmarks.parts.step_timers import use_timed_workers
        from moe_replay.engines.vllm.engine import VllmEngine

        use_timed_workers()
        self.family, self.dtype = family, "float32" if ON_CPU else dtype
        self.tolerance = TOLERANCES[self.dtype]
        self.preempts = "num_gpu_blocks_override" in options
        self.sleeps = bool(options.get("enable_sleep_mode"))
        self.model = self.load(seed=0)
        self.model.save_pretrained(folder)
        if complete is not None:
            complete(folder)
        settings = OPTIONS | ({"enforce_eager": True, "block_size": BLOCK} if ON_CPU else ON_GPU) | options
        self.engine = VllmEngine(folder, dtype=self.dtype, **settings)

    def load(self, seed: int) -> Any:
        """A model of this case on the device."""
        return random_model(self.family, getattr(torch, self.dtype), seed).to(DEVICE)

    def sampled(self, prompts: list[list[int]], params: SamplingParams) -> list[Sample]:
        """All samples of all prompts."""
        return [sample for group in self.engine.generate(prompts, params) for sample in group]

    def profile(self, *, on: bool) -> dict[str, float]:
        """Start or stop the timers of the worker, which count preemptions too."""
        return self.engine._loop.run(self.engine._llm.collective_rpc("replay_profile", args=(on,)))[0]

    def compare(self, samples: list[Sample], model: Any) -> Found:
        """Hold samples against a model that scores the same tokens."""
        same, differing = [], []
        for sample in samples:
            own, logprobs = score(model, sample.trace.token_ids)
            assert sample.trace.layers == own.layers
            assert sample.trace.valid[:-1].all()
            same.append(equal_choices(sample.trace, own))
            differing.append(np.abs(sample.logprobs - logprobs[len(sample.prompt_ids) - 1 :]))
        found = Found(float(np.concatenate(same).mean()), float(np.median(np.concatenate(differing))))
        print(f"{self.family} {self.dtype}: {found}")
        return found

    def assert_sampled_from(self, model: Any, samples: list[Sample]) -> None:
        """Raise unless routes and log-probs are those of the model."""
        found = self.compare(samples, model)
        assert found.agreement >= self.tolerance.agreement
        assert found.differing <= self.tolerance.logprobs

    def probe(self, model: Any) -> Probe:
        """The log-probs of one sequence by the model."""
        tokens = np.random.default_rng(99).integers(2, VOCABULARY, 100)
        return Probe(token_ids=tokens.tolist(), logprobs=score(model, tokens)[1], tolerance=2 * self.tolerance.logprobs)


def equal_choices(one: RouteTrace, other: RouteTrace) -> np.ndarray:
    """Whether two traces of the same tokens have the same experts, sorted, for all tokens but the last."""
    return (np.sort(one.routed_experts[:-1], -1) == np.sort(other.routed_experts[:-1], -1)).ravel()


def score(model: Any, token_ids: np.ndarray) -> tuple[RouteTrace, np.ndarray]:
    """Return the model's own routes of a sequence, and the log-probs of every token but the first."""
    ids = torch.tensor(token_ids[None], dtype=torch.long, device=DEVICE)
    replay = mr.attach(model)
    with torch.no_grad(), replay.record() as recording:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    trace = recording.traces(mr.TokenLayout.padded([len(token_ids)]), [token_ids])[0]
    replay.detach()
    return trace, logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()


@contextmanager
def started(family: str, dtype: str, folder: Path, **options: Any) -> Iterator[Case]:
    """An engine for the tests of one module, and no memory of the GPU afterwards."""
    pytest.importorskip("vllm")
    case = Case(family, dtype, folder, **options)
    try:
        yield case
    finally:
        case.engine.close()
        del case.model
        gc.collect()
        torch.cuda.empty_cache()


def random_prompts(number: int, longest: int, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Prompts of random tokens; the first `shared` are the same in all of them."""
    random = np.random.default_rng(seed)
    prefix = random.integers(2, VOCABULARY, shared).tolist()
    return [[*prefix, *random.integers(2, VOCABULARY, random.integers(1, longest)).tolist()] for _ in range(number)]
