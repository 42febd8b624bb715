"""Under replay the gates and their gradient are those of the family's formula, on the current weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import moe_replay as mr
from tests.replay.adapters.families import FAMILIES, RELEASE, available_families, tiny_config
from tests.replay.adapters.gates import (
    GATES,
    Expected,
    expected_gates,
    softmax_floored,
    softmax_kept,
    softmax_of_chosen,
    softmax_renormalised,
)
from tests.replay.adapters.watching import (
    READERS,
    forward_arguments,
    handed_out,
    lively_model,
    random_routes,
    route_batch,
    taken_by,
    watched,
)

CLOSE = {"rtol": 2e-4, "atol": 2e-6}  # float32 against float64

# Settings that change a family's formula, beside those that every family has.
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "cohere2_moe": (
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": True},
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
    "dbrx": tuple(
        {"ffn_config": FAMILIES["dbrx"]["ffn_config"] | {"moe_normalize_expert_weights": p}} for p in (None, 2.0)
    ),
    "deepseek_v2": ({"topk_method": "greedy"},),
    "deepseek_v4": ({"scoring_func": "sigmoid"},),
    "ernie4_5_moe": ({"moe_norm_min": 0.4},),  # about half the rows have less
    "laguna": ({"moe_router_logit_softcapping": 1.5},),
    "lfm2_moe": ({"use_expert_bias": False},),
    "muse_spark_text": ({"output_multiplier": 1.3},),
}
SCALES = ("routed_scaling_factor", "route_scale", "router_scaling_factor")


def cases() -> list[Any]:
    """Each family as it is, scaled, with and without renormalisation where it has these settings, and its own."""
    found = []
    for model_type in available_families():
        if model_type not in READERS:
            continue
        config = tiny_config(model_type)
        changes: list[dict[str, Any]] = [{}, *CHANGES.get(model_type, ())]
        changes += [{"norm_topk_prob": not config.norm_topk_prob}] if hasattr(config, "norm_topk_prob") else []
        changes += [{name: 1.7} for name in SCALES if hasattr(config, name)]
        found += [pytest.param((model_type, change), id=_name(model_type, change)) for change in changes]
    return found


def _name(model_type: str, change: dict[str, Any]) -> str:
    settings = {name: value for name, value in change.items() if name != "ffn_config"}
    settings |= {"p": change["ffn_config"]["moe_normalize_expert_weights"]} if "ffn_config" in change else {}
    return "-".join([model_type, *(f"{name}={value}" for name, value in settings.items())])


class Seen(NamedTuple):
    """One router under replay of foreign routes: what it handed out, with its graph, and what it should have."""

    gates: Tensor
    taken: Tensor
    should_take: Tensor
    expected: Expected
    parameters: dict[str, torch.nn.Parameter]


@pytest.fixture(scope="module", params=cases())
def routers(request: pytest.FixtureRequest) -> list[Seen]:
    """The routers of a model in a forward under random routes, which they would hardly choose."""
    model_type, changes = request.param
    model = lively_model(model_type, **changes)
    inputs = forward_arguments(model_type)
    replay = mr.attach(model)
    batch = route_batch(replay, inputs["input_ids"], random_routes(replay, inputs["input_ids"]))
    with replay.replay(batch), watched(model_type, replay.sites.values()) as calls:
        model(**inputs)
    seen = []
    for layer, site in replay.sites.items():
        experts = batch.layer(layer)[0].long()
        gates, taken = handed_out(model_type, calls[layer], site, model.config)
        expected = expected_gates(model_type, calls[layer].hidden, experts, site, model.config)
        parameters = {name: site.module.get_parameter(name) for name in expected.parameters}
        seen.append(Seen(gates, taken, taken_by(model_type, experts, site, model.config), expected, parameters))
    return seen


def test_the_gates_are_those_of_the_formula(routers):
    for router in routers:
        assert torch.equal(router.taken, router.should_take)
        torch.testing.assert_close(router.gates.double(), router.expected.gates, **CLOSE)


def test_no_gate_is_lost(routers):
    """Every replayed expert has a weight: no group mask, no threshold takes it away."""
    for router in routers:
        assert torch.equal(router.gates != 0, router.should_take)


def test_the_gradient_is_that_of_the_formula(routers):
    """Of every parameter that the gates are made from: the projection, its bias, learned scales."""
    for router in routers:
        coefficients = torch.randn(router.gates.shape, generator=torch.Generator().manual_seed(3))
        found = _gradients(router.gates * coefficients, router.parameters.values())
        wanted = _gradients(router.expected.gates * coefficients, router.expected.parameters.values())
        for name, one, other in zip(router.parameters, found, wanted, strict=True):
            assert other.abs().max() > 1e-4, f"{name} has no gradient to compare"
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-5)


def test_experts_that_were_not_taken(routers):
    """Row by row: they get a gradient where the denominator holds all logits, and none anywhere else."""
    for router in routers:
        formula = router.expected.formula
        if formula.func is softmax_floored and formula.keywords["floor"] > 1e-6:
            continue  # some rows are of one kind and some of the other; the formula's gradient is compared above
        projection = list(router.parameters.values())[:1]
        coefficients = torch.randn(router.gates.shape[1], generator=torch.Generator().manual_seed(3))
        largest = 0.0
        for gates, taken in zip(router.gates, router.should_take, strict=True):
            (gradient,) = _gradients(gates * coefficients, projection)
            size = gradient.abs().amax(-1)
            largest = max(largest, size[~taken].max().item())
            if router.expected.spreads:
                assert bool(size.all()) == bool(taken.any())  # zaya: a row that skips has no gate
        if router.expected.spreads:
            assert largest > 1e-3
        else:  # the other logits are not in the formula, or cancel out of a softmax over all but for rounding
            assert largest <= (1e-6 if has_softmax_over_all(router.expected) else 0.0)


def _gradients(values: Tensor, parameters: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(values.sum(), list(parameters), retain_graph=True)


def has_softmax_over_all(expected: Expected) -> bool:
    return expected.formula.func.__name__.startswith("softmax") and expected.formula.func is not softmax_of_chosen


def test_every_family_has_a_formula():
    assert GATES.keys() == FAMILIES.keys()
    assert RELEASE < 5 or READERS.keys() >= set(available_families())


def test_the_formulas_differ():
    """Softmax over the chosen is softmax over all renormalised, and neither is softmax over all as it is."""
    logits = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    experts = torch.tensor([[0, 3], [5, 1], [2, 4], [1, 0], [4, 5]])
    torch.testing.assert_close(softmax_of_chosen(logits, experts), softmax_renormalised(logits, experts))
    assert not torch.allclose(softmax_kept(logits, experts), softmax_renormalised(logits, experts), rtol=0.01)
