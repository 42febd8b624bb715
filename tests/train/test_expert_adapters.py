"""Adapters of fused experts beside the experts: the same function and gradients as PEFT's, without whole weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("peft")
pytest.importorskip("transformers.integrations.moe", reason="Transformers 4 has no experts by name")

from transformers.integrations import moe
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_replay.train.backends import expert_adapters, experts, lora
from moe_replay.train.config.sections import ModelConfig
from tests.replay.adapters.families import VOCABULARY, tiny_model

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"]
IDS = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped GEMM has no float64: the one of Transformers, expert by expert."""
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *args: False)


def adapted(family: str, rank: int) -> Any:
    """Return a model with adapters that are not zero, computed as PEFT does."""
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.grouped_experts)
    torch.manual_seed(0)
    model: Any = tiny_model(family).double()
    model.set_experts_implementation(experts.NAME)
    settings = {"path": "m", "lora_rank": rank, "lora_alpha": 3 * rank, "lora_target_modules": ("all-linear",)}
    lora.add_adapters(model, ModelConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.1)
    return model


def outcome(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    (logits.log_softmax(-1)[..., 7].sum() / 10).backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {"logits": logits.detach()} | gradients


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_peft(family: str, rank: int, in_float64: None) -> None:
    model = adapted(family, rank)
    moved = deepcopy(model)
    expected = outcome(model)
    expert_adapters.move_adapters(moved)
    found = outcome(moved)
    assert found.keys() == expected.keys()
    assert any("experts" in name and "lora_A" in name for name in found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")
    with lora.adapters_off(model), lora.adapters_off(moved), torch.no_grad():
        plain = model(input_ids=IDS, use_cache=False).logits
        assert not torch.allclose(plain, expected["logits"])
        torch.testing.assert_close(moved(input_ids=IDS, use_cache=False).logits, plain)


class Computed(TorchDispatchMode):
    """Counts the results of operators that have so many elements and are not views of the model's weights."""

    def __init__(self, model: Any, elements: int) -> None:
        super().__init__()
        self.elements, self.count = elements, 0
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        if isinstance(result, Tensor) and result.numel() == self.elements:
            self.count += result.untyped_storage().data_ptr() not in self.weights
        return result


def test_no_tensor_of_all_experts_is_computed() -> None:
    model = adapted("qwen3_moe", 2).float()
    size = next(one.numel() for name, one in model.named_parameters() if name.endswith(".gate_up_proj"))
    with Computed(model, size) as by_peft:
        outcome(model)
    expert_adapters.move_adapters(model)
    with Computed(model, size) as found:
        outcome(model)
    assert by_peft.count > 0
    assert found.count == 0


def test_compiled_experts_compute_the_same(in_float64: None) -> None:
    model = adapted("qwen3_moe", 4)
    expert_adapters.move_adapters(model)
    expected = outcome(model)
    module: Any = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    module.forward = torch.compile(module.forward, backend="aot_eager", dynamic=True)
    for name, value in outcome(model).items():
        torch.testing.assert_close(value, expected[name])
