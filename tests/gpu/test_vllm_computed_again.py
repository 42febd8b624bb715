"""Tokens that vLLM computes more than once: its own capture and ours each have the routes of one of the computations.

vLLM keeps routes under the hash of a prefix, we keep them under the slot in the KV cache that later tokens attend to.
Even with `VLLM_BATCH_INVARIANT=1` the second computation chooses otherwise in some token of a thousand, mostly one
expert in one layer: no row of another token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from moe_replay.engines.vllm.capture import RouteSource
from moe_replay.records import Sample, SamplingParams
from tests.gpu.engines import BLOCK, FEW_SLOTS, NEEDS_GPU, ON_CPU, Case, random_prompts, score, started

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(ON_CPU, reason="these kernels of vLLM are for GPUs")]

Routes = np.ndarray


class Captured(NamedTuple):
    """An engine, and the routes that vLLM's own capture and ours have of each completion, by its tokens."""

    case: Case
    both: dict[tuple[int, ...], tuple[Routes, Routes]]

    def assert_alike(self, samples: list[Sample]) -> None:
        """Raise unless the captures differ in a few tokens at most, and are those of the model equally often."""
        self.case.assert_sampled_from(self.case.model, samples)
        apart, right = [], []
        for sample in samples:
            ours, theirs = self.both[tuple(sample.completion_ids.tolist())]
            own, _ = score(self.case.model, sample.trace.token_ids)
            apart.append((ours != theirs).any((1, 2)))
            chosen = [np.sort(routes[:, list(own.layers)], -1) for routes in (ours, theirs)]
            right.append([(one == np.sort(own.routed_experts[: len(ours)], -1)).mean() for one in chosen])
        share, (ours_right, theirs_right) = np.concatenate(apart).mean(), np.mean(right, 0)
        print(f"{share:.2%} of tokens apart; as Transformers: {ours_right:.4f} of ours, {theirs_right:.4f} of vLLM's")
        assert share < 0.005
        assert abs(ours_right - theirs_right) < 0.003


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    both: dict[tuple[int, ...], tuple[Routes, Routes]] = {}

    def keep(source: RouteSource, ours: Routes, output: Any) -> Routes:
        both[tuple(output.token_ids)] = ours.copy(), np.asarray(output.routed_experts)[: len(ours)].copy()
        return ours

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        patch.setattr(RouteSource, "_cross_check", keep)
        options = {
            "num_gpu_blocks_override": FEW_SLOTS // BLOCK,
            "block_size": BLOCK,
            "attention_backend": "FLASH_ATTN",
        }
        with started("qwen3_moe", "bfloat16", tmp_path_factory.mktemp("model"), **options) as case:
            yield Captured(case, both)


@pytest.mark.parametrize("seed", range(3, 7))
def test_after_a_preemption(captured: Captured, seed: int) -> None:
    captured.case.profile(on=True)
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    samples = captured.case.sampled(random_prompts(12, 60, seed=seed), params)
    assert captured.case.profile(on=False)["preempted"] > 0
    captured.assert_alike(samples)


def test_by_several_requests_with_the_same_prefix(captured: Captured) -> None:
    prompts = random_prompts(12, 60, shared=40)
    captured.assert_alike(captured.case.sampled(prompts, SamplingParams(n=2, max_tokens=48, ignore_eos=True)))
