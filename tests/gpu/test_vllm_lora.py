"""The real vLLM on a GPU with a LoRA adapter of its own: it gets the adapter alone, and routes as Transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_replay.rollout.adapter import Adapter
from moe_replay.rollout.types import SamplingParams
from moe_replay.train.backends import lora
from moe_replay.train.config.sections import ModelConfig
from tests.gpu.engines import DEVICE, NEEDS_GPU, Case, random_prompts, started

pytest.importorskip("peft")
pytestmark = NEEDS_GPU

MODULES = ["gate", "k_proj", "o_proj", "q_proj", "v_proj"]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "router")
RANK = 8


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK, "lora_target_modules": MODULES}
    with started("qwen3_moe", "bfloat16", tmp_path_factory.mktemp("model"), **options) as case:
        yield case


def adapted(case: Case, seed: int) -> Any:
    """The model of the engine with an adapter that is not zero."""
    model = case.load(seed=0)
    torch.manual_seed(seed)
    lora.add_adapters(model, ModelConfig(lora_rank=RANK, lora_alpha=2 * RANK, lora_targets=TARGETS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1)
    return model.to(DEVICE).eval()


def test_routes_are_those_of_the_adapted_model(case: Case) -> None:
    prompts, params = random_prompts(8, 60), SamplingParams(n=2, max_tokens=24, ignore_eos=True)
    for version, seed in enumerate((1, 2), start=1):
        policy = adapted(case, seed)
        tensors = lora.adapter_state(policy, policy.state_dict(), lora.adapted_weights(policy), lambda whole: whole)
        case.engine.update_adapter(Adapter(tensors, RANK, 2 * RANK), version, case.probe(policy))
        samples = [sample for group in case.engine.generate(prompts, params) for sample in group]
        assert {sample.weight_version for sample in samples} == {version}
        case.assert_sampled_from(policy, samples)
        assert case.compare(samples, case.model).agreement < case.compare(samples, policy).agreement - 0.05
