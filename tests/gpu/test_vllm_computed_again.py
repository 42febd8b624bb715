"""Tokens that vLLM computes more than once: its own capture and ours agree where kernels do not depend on the batch.

Elsewhere they may differ: vLLM keeps routes under the hash of a prefix, we keep them under the slot in the KV cache
that later tokens attend to. With `VLLM_BATCH_INVARIANT=1` every computation of a token is the same, and so are routes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_replay.rollout.types import SamplingParams
from tests.gpu.engines import BLOCK, FEW_SLOTS, NEEDS_GPU, ON_CPU, Case, random_prompts, started

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(ON_CPU, reason="these kernels of vLLM are for GPUs")]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        options = {
            "num_gpu_blocks_override": FEW_SLOTS // BLOCK,
            "block_size": BLOCK,
            "attention_backend": "FLASH_ATTN",
        }
        with started("qwen3_moe", "bfloat16", tmp_path_factory.mktemp("model"), **options) as started_case:
            yield started_case


def test_after_a_preemption(case: Case) -> None:
    case.profile(on=True)
    samples = case.sampled(random_prompts(12, 60, seed=3), SamplingParams(max_tokens=150, ignore_eos=True))
    assert case.profile(on=False)["preempted"] > 0
    case.assert_sampled_from(case.model, samples)


def test_by_several_requests_with_the_same_prefix(case: Case) -> None:
    prompts = random_prompts(12, 60, shared=40)
    samples = case.sampled(prompts, SamplingParams(n=2, max_tokens=48, ignore_eos=True))
    case.assert_sampled_from(case.model, samples)
