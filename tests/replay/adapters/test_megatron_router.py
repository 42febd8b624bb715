"""Megatron-Core routers on one rank: what is recorded, replayed and recomputed, and what is counted."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch

import moe_replay as mr
from tests.combinations import with_whole_runs
from tests.distributed.megatron_models import FULL, differing, make_chunk, make_config, move_routers, routers
from tests.models import assert_same_gradients, gradients
from tests.replay.adapters.megatron_routers import (
    LAYERS,
    MICRO_BATCHES,
    as_traces,
    build,
    call,
    expected_gradients,
    layout_of,
    random_ids,
    recorded,
    routed,
    watched,
)

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.usefixtures("one_rank")

RECOMPUTE = {
    "uniform": FULL,
    "uniform-by-2": FULL | {"recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "layernorm-mlp-moe": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp", "moe"]},
}
# Recomputed norms round otherwise. They run no router, so what is compared with may recompute them too.
COMPARED = {"layernorm-mlp-moe": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}}


# ---- what it does ---------------------------------------------------------------------------------------------------


def test_layers_are_decoder_indices():
    replay = mr.attach(build())
    assert replay.layers == replay.topology.layers == LAYERS
    assert replay.native_sites == ()


def test_an_attached_model_computes_as_before_and_after():
    model, ids = build(), random_ids()
    before = call(model, ids)
    own = [router.router_replay for router in routers(model)]
    replay = mr.attach(model)
    assert torch.equal(call(model, ids), before)
    with replay.record():
        assert torch.equal(call(model, ids), before)
    replay.detach()
    assert [router.router_replay for router in routers(model)] == own
    assert torch.equal(call(model, ids), before)
    mr.attach(model)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("variant", ["hybrid", "deepseek", "presoftmax", "top1", "losses"])
def test_replay_of_a_record_is_bit_identical(variant, dispatcher):
    model, ids = build(variant, moe_token_dispatcher_type=dispatcher), random_ids()
    replay = mr.attach(model)
    with replay.record() as recording:
        first = call(model, ids)
    first.mean().backward()
    expected = gradients(model)
    with replay.replay(recording.batch()):
        again = call(model, ids)
    again.mean().backward()
    assert torch.equal(first, again)
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize("variant", ["hybrid", "deepseek", "presoftmax", "top1"])
def test_replay_pins_the_experts_where_native_routing_would_not(variant):
    model, replay, inputs, routes = routed(variant)
    taken = watched(model)
    with torch.no_grad(), replay.replay(routes[0], observe=True) as replaying:
        call(model, inputs[0])
    assert differing(replaying.native(), routes[0]).float().mean() > 0.5
    for layer in LAYERS:
        expected = torch.zeros_like(taken[layer]).scatter(1, routes[0].layer(layer)[0].long(), True)
        assert torch.equal(taken[layer], expected)


def test_traces_go_in_and_come_out():
    model, replay, inputs, routes = routed()
    traces = as_traces(routes[0], inputs[0])
    again = mr.RouteBatch.from_traces(traces, layout_of(inputs[0]), replay.layers)
    assert torch.equal(again.routed_experts, routes[0].routed_experts)
    with torch.no_grad():
        with replay.replay(again):
            output = call(model, inputs[0])
        with replay.replay(routes[0]):
            assert torch.equal(call(model, inputs[0]), output)


def test_rows_without_a_route_are_routed_natively():
    model, replay, inputs, routes = routed()
    ids = inputs[0]
    native = recorded(model, replay, ids)
    half = mr.RouteBatch.from_traces(
        [uncovered_where(trace, row) for row, trace in enumerate(as_traces(routes[0], ids))], layout_of(ids)
    )
    assert not all(half.all_valid)
    taken = watched(model)
    with torch.no_grad(), replay.replay(half):
        call(model, ids)
    first = LAYERS[0]  # its inputs depend on no route
    target, valid, _ = half.layer(first)
    expected = torch.where(valid[:, None], target, native.layer(first)[0])
    assert torch.equal(taken[first], torch.zeros_like(taken[first]).scatter(1, expected.long(), True))


def uncovered_where(trace, offset):
    valid = (np.arange(len(trace)) + offset) % 3 != 0
    return mr.RouteTrace(trace.token_ids, trace.routed_experts, trace.layers, valid, num_experts=trace.num_experts)


@pytest.mark.parametrize("wrap", ["Float16Module", "list", "DDP"])
def test_wrapped_models_are_recognised(wrap):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    if wrap == "Float16Module":
        config = make_config("bf16")
        model = Float16Module(config, make_chunk(config))
    else:
        model = build()
    if wrap == "DDP":
        model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    replay = mr.attach([model] if wrap == "list" else model)
    assert replay.layers == replay.layers_of(model) == LAYERS
    assert recorded(model, replay, random_ids()).layers == LAYERS


def test_multi_token_prediction_routes_natively_and_says_so():
    model, replay, inputs, routes = routed("mtp")
    assert replay.layers == LAYERS
    (site,) = replay.native_sites
    assert site.layer == 8
    assert "mtp" in site.name
    taken = watched(model)
    with torch.no_grad():
        call(model, inputs[0])
        native = {layer: chosen.clone() for layer, chosen in taken.items()}
        with replay.replay(routes[0]):
            call(model, inputs[0])
    assert not torch.equal(taken[1], native[1])
    assert taken[8].sum(1).unique().tolist() == [2]


# ---- recomputation --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recompute", with_whole_runs(RECOMPUTE, {"uniform", "moe"}))
def test_backward_in_any_order_with_passes_without_gradient_in_between(recompute):
    model, replay, inputs, routes = routed(**RECOMPUTE[recompute])
    expected = expected_gradients(inputs, routes, **COMPARED.get(recompute, {}))
    some = ((1, 2, 0), (2, 1, 0))
    for order in itertools.permutations(range(MICRO_BATCHES)) if recompute == "uniform" else some:
        losses = []
        for ids, batch in zip(inputs, routes, strict=True):
            with replay.replay(batch):
                losses.append(call(model, ids).mean())
            with torch.no_grad(), replay.replay(routes[0]):
                call(model, inputs[0])  # old log-probs, or an evaluation
            with torch.no_grad():
                call(model, inputs[1])
        for i in order:
            losses[i].backward()
            assert_same_gradients(gradients(model), expected[i])


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_order_test_would_notice(recompute):
    """If backwards were not tied to their passes, recomputed layers would route natively."""
    model, replay, inputs, routes = routed(**RECOMPUTE[recompute])
    expected = expected_gradients(inputs, routes, **COMPARED.get(recompute, {}))
    active = replay._active
    active.enter_backward = lambda forward_pass, **_: type(active).enter_backward(active, None)
    with replay.replay(routes[0]):
        loss = call(model, inputs[0]).mean()
    loss.backward()
    found = gradients(model)
    assert any(not torch.equal(found[name], expected[0][name]) for name in expected[0])


def test_a_recording_is_left_as_it_was_by_recomputation():
    """Megatron's own RECORD keeps the last micro-batch only, and recomputation overwrites it."""
    model, replay, inputs, _ = routed(**FULL)
    recordings, losses = [], []
    for ids in inputs:
        with replay.record() as recording:
            losses.append(call(model, ids).mean())
        recordings.append(recording)
    before = [recording.batch().routed_experts.clone() for recording in recordings]
    for loss in reversed(losses):
        loss.backward()
    for recording, experts in zip(recordings, before, strict=True):
        assert torch.equal(recording.batch().routed_experts, experts)
    assert not torch.equal(before[0], before[1])


def test_micro_batches_that_recompute_beside_some_that_do_not():
    """num_microbatches_with_partial_activation_checkpoints, and a backward in reverse."""
    model, replay, inputs, routes = routed(**FULL)
    expected = expected_gradients(inputs, routes)
    losses = []
    for i, (ids, batch) in enumerate(zip(inputs, routes, strict=True)):
        model.config.recompute_granularity = "full" if i % 2 else None
        with replay.replay(batch):
            losses.append(call(model, ids).mean())
    for i in reversed(range(MICRO_BATCHES)):
        losses[i].backward()
        assert_same_gradients(gradients(model), expected[i])


@pytest.mark.parametrize("settings", [{}, FULL], ids=["plain", "full"])
def test_nothing_is_left_of_a_step(settings):
    """Megatron's own lists grow by one tensor for each layer and micro-batch that is not recomputed."""
    model, replay, inputs, routes = routed(**settings)
    passes = []
    for ids, batch in zip(inputs, routes, strict=True):
        with replay.replay(batch):
            passes.append(weakref.ref(replay._active.opened))
            loss = call(model, ids).mean()
        loss.backward()
        del loss
    with torch.no_grad(), replay.replay(routes[0]):
        passes.append(weakref.ref(replay._active.opened))
        call(model, inputs[0])
    gc.collect()
    assert [forward_pass() for forward_pass in passes] == [None] * len(passes)
    assert replay._active._backwards == {}
    natives = [hook.native_replay for hook in replay._router_hooks]
    assert all(native.replay_backward_list == [] and native.recorded_topk_idx is None for native in natives)


# ---- what the losses and the bias count -----------------------------------------------------------------------------


def aux_gradients(aux_loss, **settings):
    """Of the routers, under replay, with the load-balancing loss alone: the language model's is left out."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)
    model = build("losses", moe_z_loss_coeff=None, moe_aux_loss_coeff=1.0, **settings)
    replay = mr.attach(model, aux_loss=aux_loss)
    batch = recorded(model, replay, random_ids())
    move_routers(model)
    counted = counts_of_the_aux_loss(model)
    with replay.replay(batch, observe=True) as replaying:
        output = call(model, random_ids())
    (0 * output.mean()).backward()
    native = {layer: replaying.native().layer(layer)[0] for layer in LAYERS}
    return counted, native, {layer: batch.layer(layer)[0] for layer in LAYERS}


def counts_of_the_aux_loss(model):
    """Tokens of each expert that each layer's load-balancing loss is computed from."""
    counted = {}
    for router in routers(model):
        own, layer = router._apply_aux_loss, router.layer_number - 1

        def apply(probs, scores, routing_map, *args, own=own, layer=layer, **kwargs):
            counted[layer] = routing_map.sum(0)
            return own(probs, scores, routing_map, *args, **kwargs)

        router._apply_aux_loss = apply
    return counted


@pytest.mark.parametrize("settings", [{}, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("aux_loss", ["native", "replayed"])
def test_what_the_load_balancing_loss_counts(aux_loss, settings):
    counted, native, replayed = aux_gradients(aux_loss, **settings)
    assert counted.keys() == set(LAYERS)
    for layer, found in counted.items():
        of_native, of_replayed = (
            torch.bincount(chosen[layer].flatten().long(), minlength=8) for chosen in (native, replayed)
        )
        assert torch.equal(found, of_native if aux_loss == "native" else of_replayed)
        assert not torch.equal(of_native, of_replayed)


def test_a_router_is_itself_again_after_replayed_losses():
    model = build("losses")
    replay = mr.attach(model, aux_loss="replayed")
    replay.detach()
    assert all("routing" not in vars(router) for router in routers(model))


@pytest.mark.parametrize("settings", [{}, FULL], ids=["plain", "full"])
def test_the_expert_bias_counts_replayed_experts_once(settings):
    model, replay, inputs, routes = routed("deepseek", **settings)
    for router in routers(model):
        router.local_tokens_per_expert.zero_()
    with replay.replay(routes[0]):
        call(model, inputs[0]).mean().backward()
    for router in routers(model):
        expected = torch.bincount(routes[0].layer(router.layer_number - 1)[0].flatten().long(), minlength=8)
        assert torch.equal(router.local_tokens_per_expert, expected.float())
