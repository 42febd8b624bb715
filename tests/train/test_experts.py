"""Experts with gathers in both directions: the same values and gradients as those of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.integrations.moe", reason="Transformers 4 has no experts by name")

from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moe_replay.train.backends import experts
from tests.replay.adapters.families import VOCABULARY, available_families, tiny_model

QUICK = {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"}
FURTHER = (pytest.mark.slow, pytest.mark.whole_runs)
IDS = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))


def outcome(model: Any, implementation: str) -> dict[str, Tensor]:
    """Return the logits of a model and all gradients, with an implementation of experts."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    output = model(input_ids=IDS, use_cache=False)
    logits = output.last_hidden_state if getattr(output, "logits", None) is None else output.logits
    (logits.float().log_softmax(-1)[..., 7].sum() / 10).backward()
    return {"logits": logits.detach()} | {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.fixture
def registered() -> None:
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.grouped_experts)


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=FURTHER) for name in available_families()]
)
def test_values_and_gradients_are_those_of_the_eager_experts(family: str, registered: None) -> None:
    model = tiny_model(family)
    if not experts.can_replace(model):
        assert family not in QUICK
        pytest.skip(f"{family} has no experts by name")
    expected = outcome(model, "eager")
    found = outcome(model, experts.NAME)
    assert found.keys() == expected.keys()
    assert any("experts" in name for name in found), "no expert has a gradient"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_gradients_of_both_directions_are_those_of_autograd() -> None:
    """In float64, against plain indexing."""
    generator = torch.Generator().manual_seed(1)
    tokens, choices, num_experts, width = 9, 3, 5, 4
    chosen = torch.rand(tokens, num_experts, generator=generator).topk(choices).indices
    order = experts.dispatch(chosen, num_experts)
    hidden = torch.randn(tokens, width, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(tokens, choices, dtype=torch.float64, generator=generator, requires_grad=True)

    def combined(hidden: Tensor, weights: Tensor) -> Tensor:
        rows = experts._ToRows.apply(hidden, order.token, order.row)
        return experts._ToTokens.apply(rows.sin(), weights, order.pair, order.token, order.row)

    assert torch.autograd.gradcheck(combined, (hidden, weights))
    expected = (hidden.sin()[:, None] * weights[..., None]).sum(1)
    torch.testing.assert_close(combined(hidden, weights), expected)


def test_rows_are_ordered_by_expert_then_by_token() -> None:
    chosen = torch.tensor([[2, 0], [0, 3], [2, 3]])
    order = experts.dispatch(chosen, 5)
    assert order.token.tolist() == [0, 1, 0, 2, 1, 2]
    assert order.offsets.tolist() == [2, 2, 4, 6, 6]
    assert chosen.reshape(-1)[order.pair].tolist() == [0, 0, 2, 2, 3, 3]
    assert order.pair[order.row.reshape(-1)].tolist() == list(range(6))


@pytest.mark.parametrize("with_gradient", [False, True])
def test_compiled_experts_compute_the_same(with_gradient: bool, registered: None) -> None:
    model = tiny_model("qwen3_moe")
    expected = outcome(model, experts.NAME)
    module: Any = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    module.forward = torch.compile(module.forward, backend="aot_eager", dynamic=True)
    with torch.set_grad_enabled(with_gradient):
        if with_gradient:
            found = outcome(model, experts.NAME)
        else:
            found = {"logits": model(input_ids=IDS, use_cache=False).logits}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_only_the_grouped_experts_of_a_model_on_a_gpu_are_replaced() -> None:
    model = tiny_model("qwen3_moe")
    experts.use_experts(model, torch.device("cpu"), log=False)
    assert model.config._experts_implementation == experts.REPLACED
    model.set_experts_implementation("eager")
    assert not experts.can_replace(model)
    experts.use_experts(model, torch.device("cuda"), log=False)
    assert model.config._experts_implementation == "eager"
