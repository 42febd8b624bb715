"""The real vLLM on a GPU with a LoRA adapter of its own: it gets the adapter alone, and routes as Transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moe_replay.engines.vllm.lora import EXPERTS, adapter_options
from moe_replay.records import SamplingParams
from moe_replay.train.backends import lora
from moe_replay.train.config.sections import ModelConfig
from moe_replay.train.setup.engines import lora_spec
from moe_replay.weights.lora_adapter import Adapter
from tests.gpu.engines import DEVICE, NEEDS_GPU, ON_CPU, Case, random_prompts, started
from tests.gpu.models import random_model

pytest.importorskip("peft")
pytestmark = NEEDS_GPU

RANK = 8
ALL = ("all-linear", "router")
TARGETS = {
    "attention-router": ("qwen3_moe", ("q_proj", "k_proj", "v_proj", "o_proj", "router")),
    "experts": ("qwen3_moe", ("gate_proj", "up_proj", "down_proj")),
    "attention-experts": ("qwen3_moe", ("all-linear",)),
    "all": ("qwen3_moe", ALL),  # whose layer of experts calls the router
    "all-mixtral": ("mixtral", ALL),  # whose block calls it
}


class Adapted(NamedTuple):
    """An engine that takes adapters, and what they change."""

    case: Case
    config: ModelConfig

    def policy(self, seed: int) -> Any:
        """The model of the engine with an adapter that is not zero."""
        model = self.case.load(seed=0)
        torch.manual_seed(seed)
        lora.add_adapters(model, self.config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(0, 0.1)
        return model.to(DEVICE).eval()


@pytest.fixture(scope="module", params=TARGETS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder: Path = tmp_path_factory.mktemp("model")
    family, targets = TARGETS[request.param]
    random_model(family, torch.bfloat16).config.save_pretrained(folder)
    config = ModelConfig(lora_rank=RANK, lora_alpha=2 * RANK, lora_target_modules=targets)
    spec = lora_spec(config, str(folder), is_server=True)
    if ON_CPU and EXPERTS in spec.modules:
        pytest.skip("vLLM has no kernels for adapters of experts on a CPU")
    with started(family, "bfloat16", folder, **adapter_options(spec)) as case:
        yield Adapted(case, config)


def adapter_of(policy: Any) -> Adapter:
    tensors = lora.adapter_state(policy, policy.state_dict(), lora.adapted_weights(policy), lambda whole: whole)
    return Adapter(tensors, RANK, 2 * RANK)


def test_routes_are_those_of_the_adapted_model(adapted: Adapted) -> None:
    case, params = adapted.case, SamplingParams(n=2, max_tokens=24, ignore_eos=True)
    for version, seed in enumerate((1, 2), start=1):
        policy = adapted.policy(seed)
        case.engine.update_adapter(adapter_of(policy), version, case.probe(policy))
        samples = case.sampled(random_prompts(8, 60), params)
        assert {sample.weight_version for sample in samples} == {version}
        case.assert_sampled_from(policy, samples)
        assert case.compare(samples, case.model).agreement < case.compare(samples, policy).agreement - 0.05
