"""Record and replay on every family: the same bits, the recorded experts, and native routing where nobody recorded.

Which experts a token visited is read off the experts themselves: the output of the sparse block at one row has a
gradient with respect to the weights of the experts that the row visited, and of no others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import moe_replay as mr
from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.site import RouterSite
from tests.combinations import with_whole_runs
from tests.models import assert_same_gradients, gradients
from tests.replay.adapters.families import available_families, tiny_config
from tests.replay.adapters.gates import GATES
from tests.replay.adapters.watching import (
    READERS,
    Handed,
    forward_arguments,
    handed_out,
    lively_model,
    random_routes,
    route_batch,
    taken_by,
    watched,
)

HANDING_OUT = [family for family in available_families() if family in READERS]
GROUP_LIMITED = [f for f in HANDING_OUT if (getattr(tiny_config(f), "n_group", None) or 1) > 1]
OF_EACH_KIND = {
    *("mixtral", "olmoe", "gpt_oss", "minimax_m2", "deepseek_v3", "deepseek_v2", "dbrx", "jetmoe", "llama4_text"),
    *("gemma4_text", "inkling_text", "longcat_flash", "zaya"),
}
# `make test-quick` and `make test` have one family of each kind of router.
FURTHER = (pytest.mark.slow, pytest.mark.whole_runs)
EVERY_FAMILY = [f if f in OF_EACH_KIND else pytest.param(f, marks=FURTHER) for f in available_families()]


@cache
def untouched(model_type: str) -> nn.Module:
    return lively_model(model_type)


def fresh(model_type: str) -> nn.Module:
    """A model that a test may change, in training mode: the tiny configs have no dropout."""
    return copy.deepcopy(untouched(model_type)).train()


# ---- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_replay_of_a_record_is_bit_identical(model_type):
    check_bits(fresh(model_type), forward_arguments(model_type))


def check_bits(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Recording changes nothing, and replaying the record repeats it: output and all gradients."""
    native, expected = output_and_gradients(model, arguments)
    replay = mr.attach(model)
    with replay.record() as recording:
        recorded, found = output_and_gradients(model, arguments)
    assert torch.equal(recorded, native)
    assert_same_gradients(found, expected)
    with replay.replay(recording.batch()):
        replayed, found = output_and_gradients(model, arguments)
    assert torch.equal(replayed, native)
    assert_same_gradients(found, expected)


def output_and_gradients(model: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(**arguments)[0]
    coefficients = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    (output * coefficients).sum().backward()
    return output.detach(), gradients(model)


# ---- the recorded experts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_the_recorded_experts_are_visited(model_type):
    """With other router weights, by which most tokens would go elsewhere."""
    model, arguments = fresh(model_type), forward_arguments(model_type)
    replay = mr.attach(model)
    with torch.no_grad(), replay.record() as recording:
        model(**arguments)
    recorded = recording.batch()
    move_projections(model_type, model, replay)
    with replay.replay(recorded, observe=True) as replaying, block_outputs(model, replay) as outputs:
        model(**arguments)

    native = replaying.native()
    elsewhere = native.routed_experts.sort(-1).values != recorded.routed_experts.sort(-1).values
    assert elsewhere.any(-1).float().mean() > 0.5
    for layer, site in replay.sites.items():
        assert_visited(model, site, outputs[layer], recorded.layer(layer)[0].long())

    # What the first router would have chosen is what it chooses: its input does not depend on any route.
    with torch.no_grad(), replay.record() as recording:
        model(**arguments)
    first = next(iter(outputs))
    assert torch.equal(native.layer(first)[0], recording.batch().layer(first)[0])


@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_with_recorded_gates_the_router_has_no_influence(model_type):
    """Other router weights: the output is that of the recording, and their gradient is zero."""
    model, arguments = fresh(model_type), forward_arguments(model_type)
    replay = mr.attach(model)
    if model_type == "inkling_text":
        with pytest.raises(UnsupportedRouterError, match="shared experts"), replay.record(gates=True):
            pass
        return
    with replay.record(gates=True) as recording:
        expected, _ = output_and_gradients(model, arguments)
    move_projections(model_type, model, replay)
    with replay.replay(recording.batch(), policy=mr.replay.ReplayPolicy(gates=True)):
        replayed, found = output_and_gradients(model, arguments)
    assert torch.equal(replayed, expected)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for site in replay.sites.values():
        assert not found[names[id(projection_of(model_type, model, site))]].any()


@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_foreign_routes_are_visited(model_type):
    """Random routes, as of another engine, with zero- and skip-experts among them."""
    model, arguments = fresh(model_type), forward_arguments(model_type)
    replay = mr.attach(model)
    batch = route_batch(replay, arguments["input_ids"], random_routes(replay, arguments["input_ids"]))
    with replay.replay(batch), block_outputs(model, replay) as outputs:
        model(**arguments)
    for layer, site in replay.sites.items():
        assert_visited(model, site, outputs[layer], batch.layer(layer)[0].long())


@pytest.mark.parametrize("model_type", GROUP_LIMITED)
def test_groups_that_the_router_would_drop(model_type):
    """Each row goes to experts of more groups than the router would keep, and every gate lives."""
    model, arguments = fresh(model_type), forward_arguments(model_type)
    replay = mr.attach(model)
    some = next(iter(replay.sites.values()))
    assert some.top_k > some.groups_kept > 0
    members, generator = some.num_experts // some.num_groups, torch.Generator().manual_seed(7)
    shape = (arguments["input_ids"].numel(), len(replay.layers), some.num_groups)
    groups = torch.rand(shape, generator=generator).argsort(-1)[..., : some.top_k]
    routes = groups * members + torch.randint(members, groups.shape, generator=generator)

    batch = route_batch(replay, arguments["input_ids"], routes)
    with replay.replay(batch), watched(model_type, replay.sites.values()) as calls:
        model(**arguments)
    for slot, (layer, site) in enumerate(replay.sites.items()):
        gates, taken = handed_out(model_type, calls[layer], site, model.config)
        assert torch.equal(taken, taken_by(model_type, routes[:, slot], site, model.config))
        assert (gates[taken] > 0).all()


@pytest.mark.parametrize("model_type", [f for f in ("deepseek_v2", "deepseek_v3", "mistral4") if f in GROUP_LIMITED])
def test_groups_with_as_many_experts_as_there_are_groups(model_type):
    """The router then asks two questions of the same form: which groups, and which are the best two of each group."""
    model = lively_model(model_type, n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=3)
    check_bits(model, forward_arguments(model_type))


def move_projections(model_type: str, model: nn.Module, replay: mr.RouterReplay) -> None:
    """Give every router another projection to logits, so that it would choose other experts."""
    generator = torch.Generator().manual_seed(6)
    for site in replay.sites.values():
        projection = projection_of(model_type, model, site)
        projection.data = torch.randn(projection.shape, generator=generator)


def projection_of(model_type: str, model: nn.Module, site: RouterSite) -> nn.Parameter:
    """The weights that a router computes its logits with."""
    columns = site.num_experts + GATES[model_type].shared(model.config)
    (projection,) = [p for p in site.module.parameters() if p.ndim == 2 and len(p) == columns]
    return projection


# ---- rows without a route -------------------------------------------------------------------------------------------
# Seen in the first router of the model, whose input does not depend on any route.


@pytest.mark.parametrize("model_type", EVERY_FAMILY)
def test_rows_without_a_route_visit_the_native_experts(model_type):
    model, arguments = fresh(model_type), forward_arguments(model_type)
    replay = mr.attach(model)
    routes = random_routes(replay, arguments["input_ids"])
    valid = torch.rand(routes.shape[:2], generator=torch.Generator().manual_seed(8)) < 0.5
    with torch.no_grad(), replay.record() as recording:
        model(**arguments)
    with block_outputs(model, replay) as native_outputs:
        model(**arguments)
    batch = route_batch(replay, arguments["input_ids"], routes, valid)
    with replay.replay(batch), block_outputs(model, replay) as outputs:
        model(**arguments)

    first = next(iter(outputs))
    slot, native = replay.layers.index(first), recording.batch().layer(first)[0].long()
    mixed = torch.where(valid[:, slot, None], routes[:, slot], native)
    assert 0 < valid[:, slot].sum() < len(valid)
    assert_visited(model, replay.sites[first], native_outputs[first], native)
    assert_visited(model, replay.sites[first], outputs[first], mixed)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", with_whole_runs(HANDING_OUT, [f for f in HANDING_OUT if f not in OF_EACH_KIND]))
def test_rows_without_a_route_get_the_native_gates(model_type):
    """Bit by bit, for any set of rows; the others get what they would if all rows had a route."""
    model, arguments = fresh(model_type), forward_arguments(model_type)
    replay = mr.attach(model)

    @settings(max_examples=6 if model_type in OF_EACH_KIND else 1)
    @given(seed=st.integers(0, 2**31), covered=st.floats(0, 1))
    @example(seed=8, covered=0.5)
    def check(seed: int, covered: float) -> None:
        routes = random_routes(replay, arguments["input_ids"], seed)
        valid = torch.rand(routes.shape[:2], generator=torch.Generator().manual_seed(seed)) < covered
        first, native = first_gates(model_type, model, replay)
        _, replayed = first_gates(model_type, model, replay, route_batch(replay, arguments["input_ids"], routes))
        _, mixed = first_gates(model_type, model, replay, route_batch(replay, arguments["input_ids"], routes, valid))
        slot = replay.layers.index(first)
        rows = valid[:, slot]
        for found, with_routes, without in zip(mixed, replayed, native, strict=True):
            assert torch.equal(found[rows], with_routes[rows])
            assert torch.equal(found[~rows], without[~rows])
        should_take = taken_by(model_type, routes[:, slot], replay.sites[first], model.config)
        assert torch.equal(mixed[1][rows], should_take[rows])

    check()


def first_gates(
    model_type: str, model: nn.Module, replay: mr.RouterReplay, batch: mr.RouteBatch | None = None
) -> tuple[int, Handed]:
    """The layer of the router that runs first, and what it hands out, natively or under replay."""
    context = nullcontext() if batch is None else replay.replay(batch)
    with torch.no_grad(), context, watched(model_type, replay.sites.values()) as calls:
        model(**forward_arguments(model_type))
    first = next(iter(calls))
    return first, handed_out(model_type, calls[first], replay.sites[first], model.config)


# ---- experts visited ------------------------------------------------------------------------------------------------

LAST_PROJECTIONS = {"down_proj", "w2", "fc2", "output_linear"}


@contextmanager
def block_outputs(model: nn.Module, replay: mr.RouterReplay) -> Iterator[dict[int, Tensor]]:
    """What comes out of the experts of each router: layer -> output, in the order in which the blocks ran."""
    outputs: dict[int, Tensor] = {}

    def comes_out(layer: int, output: Any) -> None:
        # The innermost module ends first. (The attention experts of jetmoe are never called as a module.)
        outputs.setdefault(layer, output[0] if isinstance(output, tuple) else output)

    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, args, output, layer=layer: comes_out(layer, output))
        for layer, site in replay.sites.items()
        for name in _modules_around(_expert_weights(model, site)[0])
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def assert_visited(model: nn.Module, site: RouterSite, output: Tensor, experts: Tensor) -> None:
    """The rows of `output` have been at these experts (R, K) and at no others; those without weights leave no trace."""
    _, weights = _expert_weights(model, site)
    rows = output.reshape(len(experts), -1)
    coefficients = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(9))
    visited = []
    for row in rows:
        found = torch.autograd.grad(
            (row * coefficients).sum(), weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        visited.append(_by_expert(found, site).any(-1))
    number = len(visited[0])
    assert number == site.num_experts - without_weights(model.config)
    should_visit = torch.zeros(len(experts), site.num_experts, dtype=torch.bool).scatter(-1, experts, True)
    assert torch.equal(torch.stack(visited), should_visit[:, :number]), f"{site}"


def without_weights(config: Any) -> int:
    """The last columns of some routers: zero-experts of longcat_flash, the skip-expert of zaya."""
    return {"longcat_flash": 2, "zaya": 1}.get(config.model_type, 0)


def _by_expert(gradients: Sequence[Tensor], site: RouterSite) -> Tensor:
    """(E, ...) of a list of experts, of experts in one tensor, or (dbrx) of matrices below each other in one."""
    if len(gradients) > 1:
        return torch.stack(list(gradients)).flatten(1)
    return gradients[0].flatten(1) if gradients[0].ndim == 3 else gradients[0].view(site.num_experts, -1)


def _expert_weights(model: nn.Module, site: RouterSite) -> tuple[str, list[nn.Parameter]]:
    """The last projections of the experts that a router chooses from, and the module that holds them and the router."""
    for around in _modules_around(site.name):
        found = [
            parameter
            for name, parameter in model.get_submodule(around).named_parameters(prefix=around)
            if LAST_PROJECTIONS.intersection(name.split("."))
            and (parameter.ndim == 3 or "experts" in name.split("."))
            and "shared" not in name
        ]
        if found:
            return around, found
    raise AssertionError(f"no experts beside {site}")


def _modules_around(name: str) -> Iterator[str]:
    """The module itself and those around it, from the inside out, as far as the decoder layer."""
    parts = name.split(".")
    while not parts[-1].isdigit():
        yield ".".join(parts)
        parts.pop()
    yield ".".join(parts)
