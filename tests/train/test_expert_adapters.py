"""Adapters of fused experts beside the experts: the same function and gradients as PEFT's, without whole weights."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
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


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 3])
def test_compiled_code_gives_grouped_gemms_a_layout_that_gpus_take(rank: int) -> None:
    """A compiler leaves out `contiguous()`, and GPUs refuse weights that have the experts as their fastest axis."""
    from torch._inductor.utils import run_and_get_code

    experts, width, out, padded = 4, 16, 32, 8
    wrapper: Any = SimpleNamespace(
        disable_adapters=False,
        active_adapters=["a"],
        num_experts=experts,
        lora_A={"a": torch.nn.Linear(width, experts * rank, bias=False, dtype=torch.bfloat16)},
        lora_B={"a": torch.nn.Linear(experts * rank, out, bias=False, dtype=torch.bfloat16)},
        scaling={"a": 2.0},
    )
    module = SimpleNamespace(expert_adapters={"up": wrapper})
    rows, offsets = torch.randn(12, width).bfloat16(), torch.tensor([3, 6, 9, 12], dtype=torch.int32)
    projected = torch.zeros(12, out, dtype=torch.bfloat16)

    def run(projected: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        return expert_adapters.with_adapter(projected, module, "up", rows, offsets)

    with torch.no_grad():
        found, (code,) = run_and_get_code(torch.compile(run), projected, rows, offsets)
        torch.testing.assert_close(found, run(projected, rows, offsets))
    calls = [line for line in code.splitlines() if "grouped_mm" in line and f"({experts}, {padded}, {out})" in line]
    assert calls, "the second factor goes through a grouped GEMM"
    assert all(f"({experts}, {padded}, {out}), ({padded * out}, 1, {padded})" in line for line in calls), calls


@pytest.mark.parametrize("padding", [0, 2])
def test_the_second_factor_by_expert_has_the_gradient_of_a_permutation(padding: int) -> None:
    up = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(expert_adapters._by_expert, (up, 4, padding))
    found = expert_adapters._by_expert(up, 4, padding)
    assert found.is_contiguous()
    assert torch.equal(found[:, :, :3], up.view(5, 3, 4).permute(2, 0, 1))
    assert not found[:, :, 3:].any()
    assert torch.autograd.gradcheck(lambda up: expert_adapters._by_expert(up, 4, padding), (up,))
