"""What must hold on every version of Megatron-Core from 0.12 on: `make test-megatron-versions` runs it on each."""

from __future__ import annotations

import itertools

import pytest
import torch

import moe_replay as mr
from moe_replay.replay.adapters.megatron_settings import megatron_version
from tests.combinations import with_thorough
from tests.distributed.megatron_models import (
    FULL,
    VOCABULARY,
    differing,
    make_chunk,
    make_config,
    make_hybrid,
    move_routers,
    routers,
)
from tests.models import assert_same_gradients, gradients

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank")]

LAYERS = (1, 2, 4, 5, 7)
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
SEQ_AUX = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0}
GROUPS_AS_MANY_AS_MEMBERS = {
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
}
ROUTERS = {
    "post-softmax": ("hybrid", {}),
    "pre-softmax": ("presoftmax", {}),
    "top1": ("top1", {}),
    "groups-bias-sigmoid": ("deepseek", {}),
    "groups-softmax": ("hybrid", GROUPS_AS_MANY_AS_MEMBERS),
    "one-group": ("hybrid", {"moe_router_num_groups": 1, "moe_router_group_topk": 1}),
    "aux": ("hybrid", AUX),
    "seq-aux": ("hybrid", SEQ_AUX),
}


def build(router, **settings):
    variant, more = ROUTERS[router]
    torch.manual_seed(7)
    return make_chunk(make_config(variant, **(more | settings)))


def attached(model):
    """With the way to count load-balancing losses that every version has."""
    return mr.attach(model, aux_loss="replayed")


def ids_of(seed):
    return torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))


def call(model, ids):
    return model(ids, torch.arange(9).expand_as(ids), None, labels=ids.roll(-1, 1))


def recorded(model, replay, ids):
    with torch.no_grad(), replay.record() as recording:
        call(model, ids)
    return recording.batch()


def watched(model):
    """The routing map (rows, experts) of each layer's last forward."""
    maps = {}
    for router in routers(model):
        layer = router.layer_number - 1
        router.register_forward_hook(lambda m, args, out, layer=layer: maps.update({layer: out[1]}))
    return maps


def as_map(batch, layer, like):
    return torch.zeros_like(like).scatter(1, batch.layer(layer)[0].long(), True)


@pytest.mark.parametrize("router", ROUTERS)
def test_replay_of_a_record_is_bit_identical(router):
    model, ids = build(router), ids_of(0)
    native = call(model, ids)
    native.mean().backward()
    expected = gradients(model)
    replay = attached(model)
    maps = watched(model)
    with replay.record() as recording:
        first = call(model, ids)
    first.mean().backward()
    batch = recording.batch()
    assert torch.equal(first, native)
    assert_same_gradients(gradients(model), expected)
    for layer in LAYERS:
        assert torch.equal(maps[layer], as_map(batch, layer, maps[layer]))
    with replay.replay(batch):
        again = call(model, ids)
    again.mean().backward()
    assert torch.equal(again, native)
    assert_same_gradients(gradients(model), expected)


def taken_by(model):
    """The experts (rows, K) that each router takes in its last forward, in their order."""
    taken = {}
    for router in routers(model):
        hook, layer = router.router_replay, router.layer_number - 1

        def choose(*arguments, choose=hook.get_replay_topk, layer=layer, **options):
            values, experts = choose(*arguments, **options)
            taken[layer] = experts
            return values, experts

        hook.get_replay_topk = choose
    return taken


@pytest.mark.parametrize("router", ROUTERS)
def test_the_recorded_order_is_the_replayed_order_with_and_without_gradients(router):
    """From 0.19 on `topk` sorts only where there are gradients: an update has them, a scoring pass does not."""
    model, ids = build(router), ids_of(0)
    if not hasattr(routers(model)[0], "router_replay"):
        pytest.skip("before 0.16 the result of `topk` is replaced as it is")
    replay = attached(model)
    scoring = recorded(model, replay, ids)
    with replay.record() as recording:
        call(model, ids)
    update = recording.batch()
    taken = taken_by(model)
    for source in (scoring, update):
        for with_gradient in (True, False):
            with torch.set_grad_enabled(with_gradient), replay.replay(source):
                call(model, ids)
            for layer in LAYERS:
                assert torch.equal(taken[layer], source.layer(layer)[0].long())
    for layer in LAYERS:
        assert torch.equal(scoring.layer(layer)[0].sort(-1).values, update.layer(layer)[0].sort(-1).values)


@pytest.mark.parametrize("router", ROUTERS)
def test_replay_pins_the_experts_where_native_routing_would_not(router):
    model, ids = build(router), ids_of(0)
    replay = attached(model)
    batch = recorded(model, replay, ids)
    move_routers(model)
    maps = watched(model)
    with replay.replay(batch, observe=True) as replaying:
        output = call(model, ids)
    for layer in LAYERS:
        assert torch.equal(maps[layer], as_map(batch, layer, maps[layer]))
    native = replaying.native()
    assert differing(native, batch).float().mean() > 0.5
    output.mean().backward()
    assert all(router.weight.grad.norm() > 0 for router in routers(model))
    replay.detach()
    with torch.no_grad():
        call(model, ids)
    first = LAYERS[0]  # its inputs depend on no route
    assert torch.equal(maps[first], as_map(native, first, maps[first]))


@pytest.mark.parametrize(
    ("router", "method"),
    with_thorough(
        itertools.product(["post-softmax", "groups-bias-sigmoid", "groups-softmax", "aux"], ["uniform", "block"]),
        [
            ("post-softmax", "block"),
            ("groups-bias-sigmoid", "uniform"),
            ("groups-softmax", "block"),
            ("aux", "uniform"),
        ],
    ),
)
def test_recomputation_in_any_order(router, method):
    plain = build(router)
    model = build(router, **FULL | {"recompute_method": method})
    replay, of_plain = attached(model), attached(plain)
    inputs = [ids_of(seed) for seed in range(3)]
    routes = [recorded(plain, of_plain, ids) for ids in inputs]
    move_routers(plain)
    move_routers(model)
    expected = []
    for ids, batch in zip(inputs, routes, strict=True):
        with of_plain.replay(batch):
            call(plain, ids).mean().backward()
        expected.append(gradients(plain))
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):  # all six: test_megatron_router.py
        losses = []
        for ids, batch in zip(inputs, routes, strict=True):
            with replay.replay(batch):
                losses.append(call(model, ids).mean())
        for i in order:
            losses[i].backward()
            assert_same_gradients(gradients(model), expected[i])


def test_layers_of_a_hybrid_model():
    model = build("post-softmax")
    assert attached(model).layers == LAYERS


@pytest.mark.parametrize("depths", [1, 2])
def test_layers_of_multi_token_prediction_follow_those_of_the_decoder(depths):
    replay = attached(make_chunk(make_config("mtp", mtp_num_layers=depths)))
    assert replay.layers == LAYERS
    assert [site.layer for site in replay.native_sites] == [8, 9][:depths]


def test_a_hybrid_model_declares_its_routers_by_a_pattern():
    if megatron_version() < (0, 16):
        pytest.skip("its pattern has no layers with experts")
    torch.manual_seed(7)
    model, ids = make_hybrid(make_config(num_layers=4, moe_layer_freq=1), "*E*E"), ids_of(0)
    replay = attached(model)
    assert replay.layers == replay.topology.layers == (1, 3)
    assert replay.topology.num_layers == 4
    native = call(model, ids)
    batch = recorded(model, replay, ids)
    move_routers(model)
    with torch.no_grad(), replay.replay(batch):
        moved = call(model, ids)
    with replay.replay(batch, observe=True) as replaying:
        assert torch.equal(call(model, ids), moved)
    assert differing(replaying.native(), batch).float().mean() > 0.5
    assert not torch.equal(moved, native)


def test_native_load_balancing_where_the_version_has_it():
    model, ids = build("aux"), ids_of(0)
    if megatron_version() < (0, 14):
        with pytest.raises(mr.errors.UnsupportedRouterError, match="aux_loss='replayed'"):
            mr.attach(model)
        assert mr.attach(build("post-softmax")).layers == LAYERS
        return
    replay = mr.attach(model)
    batch = recorded(model, replay, ids)
    move_routers(model)
    expected = aux_gradient(model, replay, batch, ids)
    replay.detach()
    again = mr.attach(model, aux_loss="replayed")
    assert not torch.equal(aux_gradient(model, again, batch, ids), expected)


def aux_gradient(model, replay, batch, ids):
    """Of the first router, by its load-balancing loss alone."""
    with replay.replay(batch):
        output = call(model, ids)
    (0 * output.mean()).backward()
    return gradients(model)[f"decoder.layers.{LAYERS[0]}.mlp.router.weight"]


@pytest.mark.parametrize("setting", ["moe_expert_capacity_factor", "enable_cuda_graph", "external_cuda_graph"])
def test_settings_that_every_version_has_are_refused(setting):
    model = build("post-softmax")
    value = 1.0 if setting == "moe_expert_capacity_factor" else True
    setattr(model.config, setting, value)
    if setting.endswith("cuda_graph") and hasattr(model.config, "cuda_graph_impl"):
        pytest.skip("the config turns it into cuda_graph_impl when it is made")
    with pytest.raises(mr.errors.UnsupportedRouterError, match=setting):
        attached(model)
