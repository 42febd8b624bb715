"""Megatron-Core routers on one rank: what is recorded, replayed and recomputed, and what is refused.

The sections follow the ways in which replay on Megatron-Core is known to go wrong; each is shown to be impossible
here, or refused.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import moe_replay as mr
from moe_replay.megatron import cpu as megatron_cpu
from tests.distributed.megatron_models import (
    FULL,
    VOCABULARY,
    differing,
    make_chunk,
    make_config,
    move_routers,
    routers,
    start,
)
from tests.models import assert_same_gradients, gradients

pytest.importorskip("megatron.core")

LAYERS = (1, 2, 4, 5, 7)
MICRO_BATCHES = 3
RECOMPUTE = {
    "uniform": FULL,
    "uniform-by-2": FULL | {"recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "layernorm-mlp-moe": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp", "moe"]},
}
# Recomputed norms round otherwise. They run no router, so what is compared with may recompute them too.
COMPARED = {"layernorm-mlp-moe": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """Megatron-Core on the CPU, with one rank, and everything taken back afterwards."""
    store = tmp_path_factory.mktemp("megatron") / "rendezvous"
    with megatron_cpu.enabled():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        start()
        yield
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(variant="hybrid", seed=7, **settings):
    torch.manual_seed(seed)
    return make_chunk(make_config(variant, **settings))


def random_ids(seed=0, batch=2, width=9):
    return torch.randint(1, VOCABULARY, (batch, width), generator=torch.Generator().manual_seed(seed))


def call(model, ids, **kwargs):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return model(ids, positions, None, labels=ids.roll(-1, 1), **kwargs)


def recorded(model, replay, ids):
    with torch.no_grad(), replay.record() as recording:
        call(model, ids)
    return recording.batch()


def routed(variant="hybrid", **settings):
    """A model whose routers have moved since the routes of three micro-batches were recorded."""
    model = build(variant, **settings)
    replay = mr.attach(model)
    inputs = [random_ids(seed) for seed in range(MICRO_BATCHES)]
    routes = [recorded(model, replay, ids) for ids in inputs]
    move_routers(model)
    return model, replay, inputs, routes


def expected_gradients(inputs, routes, variant="hybrid", **settings):
    """Of each micro-batch alone, without recomputation."""
    model = build(variant, **settings)
    move_routers(model)
    replay = mr.attach(model)
    found = []
    for ids, batch in zip(inputs, routes, strict=True):
        with replay.replay(batch):
            call(model, ids).mean().backward()
        found.append(gradients(model))
    return found


def layout_of(ids):
    return mr.TokenLayout.padded([ids.shape[1]] * ids.shape[0]).sequence_major()


def as_traces(batch, ids):
    return batch.to_traces(ids.tolist(), layout_of(ids))


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


def watched(model):
    """The routing map (rows, experts) of each layer's last forward."""
    maps = {}
    for router in routers(model):
        layer = router.layer_number - 1
        router.register_forward_hook(lambda m, args, out, layer=layer: maps.update({layer: out[1]}))
    return maps


def test_traces_go_in_and_come_out():
    model, replay, inputs, routes = routed()
    traces = as_traces(routes[0], inputs[0])
    again = mr.RouteBatch.from_traces(traces, layout_of(inputs[0]), replay.layers)
    assert torch.equal(again.experts, routes[0].experts)
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
    return mr.RouteTrace(trace.token_ids, trace.experts, trace.layers, valid, num_experts=trace.num_experts)


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


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_backward_in_any_order_with_passes_without_gradient_in_between(recompute):
    model, replay, inputs, routes = routed(**RECOMPUTE[recompute])
    expected = expected_gradients(inputs, routes, **COMPARED.get(recompute, {}))
    some = ((0, 1, 2), (1, 2, 0), (2, 1, 0))
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
    active.enter_backward = lambda forward_pass: type(active).enter_backward(active, None)
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
    before = [recording.batch().experts.clone() for recording in recordings]
    for loss in reversed(losses):
        loss.backward()
    for recording, experts in zip(recordings, before, strict=True):
        assert torch.equal(recording.batch().experts, experts)
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


# ---- hazards of the process-wide list, of modes and of positions ----------------------------------------------------


def test_a_reference_model_in_the_same_process_sees_nothing():
    model, replay, inputs, routes = routed()
    reference = build(seed=8)
    rebuilt = build(seed=9)  # as a trainer rebuilds its decoder
    other = mr.attach(reference)
    del rebuilt
    with torch.no_grad():
        native = call(reference, inputs[0])
        with replay.replay(routes[0]):
            call(model, inputs[0])
            assert torch.equal(call(reference, inputs[0]), native)
        with other.record() as recording:
            call(reference, inputs[0])
    assert recording.batch().layers == LAYERS


def test_megatrons_own_switch_has_no_effect_on_an_attached_model():
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    model, replay, inputs, routes = routed()
    with torch.no_grad():
        native = call(model, inputs[0])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        assert torch.equal(call(model, inputs[0]), native)
        with replay.replay(routes[0]):
            call(model, inputs[0])
    RouterReplay.clear_global_router_replay_action()


def test_layers_that_are_shifted_are_refused():
    model, replay, inputs, routes = routed()
    shifted = [
        mr.RouteTrace(trace.token_ids, trace.experts, (0, 1, 3, 4, 6), num_experts=8)
        for trace in as_traces(routes[0], inputs[0])
    ]
    batch = mr.RouteBatch.from_traces(shifted, layout_of(inputs[0]))
    with (
        pytest.raises(mr.AlignmentError, match=r"expected layers \[1, 2, 4, 5, 7\], found layers \[0, 1, 3, 4, 6\]"),
        replay.replay(batch),
    ):
        call(model, inputs[0])


def test_a_forward_after_a_step_routes_natively():
    """Where Megatron's own action is left on, an evaluation takes stale routes."""
    model, replay, inputs, routes = routed()
    with torch.no_grad():
        native = call(model, inputs[1])
    with replay.replay(routes[0]):
        call(model, inputs[0]).mean().backward()
    with torch.no_grad():
        assert torch.equal(call(model, inputs[1]), native)


def test_routes_of_one_micro_batch_do_not_serve_the_next():
    model, replay, inputs, routes = routed()
    with (
        torch.no_grad(),
        pytest.raises(mr.AlignmentError, match="another token than the routes belong to"),
        replay.replay(routes[0]),
    ):
        call(model, inputs[1])
    with torch.no_grad(), pytest.raises(mr.errors.ReplayStateError, match="twice"), replay.replay(routes[0]):
        call(model, inputs[0])
        call(model, inputs[0])
    with pytest.raises(mr.errors.ReplayStateError, match="did not run inside this replay"), replay.replay(routes[0]):
        pass


def fail(*args):
    raise RuntimeError("planted")


@pytest.mark.parametrize("context", ["replay", "record"])
def test_tokens_after_a_forward_that_failed_before_any_router(context):
    """Tokens are compared, and recorded, once a forward: not once a context."""
    model, replay, inputs, routes = routed()

    def forwards():
        handle = model.decoder.layers[0].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            call(model, inputs[0])
        handle.remove()
        call(model, inputs[1])

    if context == "record":
        with torch.no_grad(), replay.record() as recording:
            forwards()
        assert torch.equal(recording.batch().fed_token_ids, inputs[1].int())
        return
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="another token"), replay.replay(routes[0]):
        forwards()


def test_other_tokens_than_those_passed():
    model, replay, inputs, routes = routed()
    with (
        torch.no_grad(),
        pytest.raises(mr.AlignmentError, match="another token"),
        replay.replay(routes[0], fed_ids=inputs[0]),
    ):
        call(model, inputs[1])
    with (
        torch.no_grad(),
        pytest.raises(mr.AlignmentError, match="passed as fed_ids"),
        replay.record(fed_ids=inputs[0]),
    ):
        call(model, inputs[1])


@pytest.mark.parametrize(("change", "text"), [({"moe_router_topk": 3}, "top 2"), ({"num_moe_experts": 4}, "8 experts")])
def test_routes_of_another_router_are_refused(change, text):
    _, _, inputs, routes = routed()
    other = build(**change)
    with pytest.raises(mr.AlignmentError, match=text), mr.attach(other).replay(routes[0]):
        call(other, inputs[0])


def test_other_rows_than_the_router_sees_are_refused():
    model, replay, inputs, routes = routed()
    traces = [trace[:8] for trace in as_traces(routes[0], inputs[0])]
    batch = mr.RouteBatch.from_traces(traces, layout_of(inputs[0][:, :8]))
    with pytest.raises(mr.AlignmentError, match=r"another shape than the routes belong to"), replay.replay(batch):
        call(model, inputs[0])
    with (
        pytest.raises(mr.AlignmentError, match=r"another number of rows.*expected 16 rows, found 18 rows"),
        replay.replay(batch, unverified=True),
    ):
        call(model, inputs[0])


def test_batch_major_rows_are_refused():
    model, replay, inputs, routes = routed()
    layout = mr.TokenLayout.padded([9, 9])
    batch = mr.RouteBatch.from_traces(as_traces(routes[0], inputs[0]), layout)
    with pytest.raises(mr.AlignmentError, match="expected sequence-major, found batch-major"), replay.replay(batch):
        call(model, inputs[0])


def test_sequence_shards_that_the_model_does_not_make_are_refused():
    model, replay, inputs, routes = routed()
    ids = inputs[0][:, :8]
    traces = [trace[:8] for trace in as_traces(routes[0], inputs[0])]
    batch = mr.RouteBatch.from_traces(traces, layout_of(ids).sequence_parallel(1, 2))
    with (
        pytest.raises(mr.AlignmentError, match=r"expected sequence parallel .* \(0, 1\), found \(1, 2\)"),
        replay.replay(batch),
    ):
        call(model, ids)


@pytest.mark.parametrize(
    ("row", "text"), [([3, 3], "occurs twice in one row"), ([-1, 2], "out of range"), ([8, 2], "out of range")]
)
def test_rows_that_no_router_can_have_chosen_are_refused(row, text):
    experts = np.tile([0, 1], (4, len(LAYERS), 1))
    experts[2, 1] = row
    with pytest.raises(mr.errors.TraceError, match=rf"{text} \[layer 2, token 2\]"):
        mr.RouteTrace([1, 2, 3, 4], experts, LAYERS, num_experts=8)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_every_integer_type_replays_alike(dtype):
    model, replay, inputs, routes = routed()
    traces = [
        mr.RouteTrace(trace.token_ids, trace.experts.astype(dtype), trace.layers, num_experts=8)
        for trace in as_traces(routes[0], inputs[0])
    ]
    batch = mr.RouteBatch.from_traces(traces, layout_of(inputs[0]))
    assert batch.experts.dtype == torch.uint8
    with torch.no_grad():
        with replay.replay(batch):
            found = call(model, inputs[0])
        with replay.replay(routes[0]):
            assert torch.equal(call(model, inputs[0]), found)


def test_a_padding_mask_changes_no_route():
    model, replay, inputs, routes = routed()
    mask = torch.zeros_like(inputs[0], dtype=torch.bool)
    mask[:, -3:] = True
    taken = watched(model)
    with torch.no_grad(), replay.replay(routes[0]):
        call(model, inputs[0], padding_mask=mask)
    for layer in LAYERS:
        expected = torch.zeros_like(taken[layer]).scatter(1, routes[0].layer(layer)[0].long(), True)
        assert torch.equal(taken[layer], expected)


# ---- what the losses and the bias count -----------------------------------------------------------------------------


def aux_gradients(aux_loss, **settings):
    """Of the routers, under replay, with the load-balancing loss alone: the language model's is left out."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
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


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED = {
    "moe_router_fusion": {"moe_router_fusion": True},
    "moe_router_load_balancing_type": {"moe_router_load_balancing_type": "sinkhorn"},
    "moe_expert_capacity_factor": {
        "moe_expert_capacity_factor": 1.0,
        "moe_router_load_balancing_type": "aux_loss",
    },
    "moe_enable_routing_replay": {"moe_enable_routing_replay": False},
    "moe_router_force_load_balancing": {"moe_router_force_load_balancing": True},
}
REFUSED_LATER = {  # a config that cannot be built here, for want of a GPU or of ranks
    "overlap_moe_expert_parallel_comm": {"overlap_moe_expert_parallel_comm": True},
    "moe_token_dropping": {"moe_token_dropping": True},
    "moe_tp_extend_ep": {"moe_tp_extend_ep": True},  # MindSpeed's
    "fix_router": {"fix_router": True},
    "moe_fb_overlap": {"moe_fb_overlap": True},
    "cuda_graph_impl": {"cuda_graph_impl": "local"},
    "batch_p2p_comm": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "expert_tensor_parallel_size": {"expert_tensor_parallel_size": 2},
}


@pytest.mark.parametrize("setting", REFUSED | REFUSED_LATER)
def test_a_setting_is_refused_by_name_before_the_first_forward(setting):
    model = build(**REFUSED.get(setting, {}))
    own = [router.router_replay for router in routers(model)]
    for name, value in REFUSED_LATER.get(setting, {}).items():
        setattr(model.config, name, value)
    with pytest.raises(mr.errors.UnsupportedRouterError, match=setting):
        mr.attach(model)
    assert [router.router_replay for router in routers(model)] == own


def test_a_config_that_was_rebuilt_with_more_fields_is_attached():
    """MindSpeed replaces the class of every TransformerConfig by one with its own settings as fields."""
    model = build()
    more = [
        ("use_flash_attn", bool, dataclasses.field(init=False)),
        ("fix_router", bool, dataclasses.field(init=False)),
    ]
    config = model.config
    config.__class__ = dataclasses.make_dataclass("TransformerConfig", more, bases=(type(config),))
    config.use_flash_attn, config.fix_router = True, False
    assert mr.attach(model).layers == LAYERS


@pytest.mark.parametrize(
    ("scope", "refused"),
    [([], True), (["moe"], True), (["attn", "moe_router"], True), (["full_iteration"], True), (["attn", "mlp"], False)],
)
def test_cuda_graphs_beside_the_router_are_allowed(scope, refused):
    from megatron.core.transformer.enums import CudaGraphScope

    model = build()
    model.config.cuda_graph_impl = "transformer_engine"
    model.config.cuda_graph_scope = [CudaGraphScope[name] for name in scope]
    if refused:
        with pytest.raises(mr.errors.UnsupportedRouterError, match="cuda_graph_impl"):
            mr.attach(model)
    else:
        assert mr.attach(model).layers == LAYERS


def test_interleaving_two_stages_without_batched_messages_is_allowed():
    model = build()
    model.config.pipeline_model_parallel_size = model.config.virtual_pipeline_model_parallel_size = 2
    model.config.batch_p2p_comm = False
    assert mr.attach(model).layers == LAYERS


def test_attaching_twice_is_refused():
    model = build()
    replay = mr.attach(model)
    with pytest.raises(mr.errors.ReplayStateError, match="attached already"):
        mr.attach([model])
    replay.detach()
    mr.attach(model)


def test_one_layer_in_two_chunks_is_refused():
    with pytest.raises(mr.errors.UnsupportedRouterError, match="two chunks of one rank hold the same decoder layer"):
        mr.attach([build(), build()])


def test_a_router_that_does_not_know_its_layer_is_refused():
    model = build()
    routers(model)[1].set_layer_number(7)
    with pytest.raises(mr.errors.UnsupportedRouterError, match=r"expected layer_number 3.*found 7"):
        mr.attach(model)


def test_routers_that_the_config_does_not_promise_are_refused():
    model = build()
    model.config.moe_layer_freq = 1
    with pytest.raises(mr.errors.UnsupportedRouterError, match="not those that its config declares"):
        mr.attach(model)


def test_an_unknown_version_is_refused(monkeypatch):
    import megatron.core

    model = build()
    for version in ("0.11.0", "main"):
        monkeypatch.setattr(megatron.core, "__version__", version)
        with pytest.raises(mr.errors.UnsupportedRouterError, match=r"megatron.core.__version__ of at least 0.12"):
            mr.attach(model)
    monkeypatch.undo()
    assert mr.attach(model).layers == LAYERS


def test_modules_of_another_library_are_refused():
    with pytest.raises(mr.errors.UnsupportedRouterError, match="not Megatron-Core chunks"):
        mr.attach([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
