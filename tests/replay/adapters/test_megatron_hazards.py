"""Megatron-Core routers on one rank: the ways in which replay is known to go wrong.

Each is shown to be impossible here, or refused.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.routes.layout import RowOrder
from tests.distributed.megatron_models import routers
from tests.replay.adapters.megatron_routers import LAYERS, as_traces, build, call, layout_of, routed, watched

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.usefixtures("one_rank")


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
        mr.RouteTrace(trace.token_ids, trace.routed_experts, (0, 1, 3, 4, 6), num_experts=8)
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
    ("rows", "text"),
    [(RowOrder("batch"), "found batch-major"), (RowOrder("sequence", (1, 2)), r"found \(1, 2\)")],
)
def test_a_recording_of_other_rows_is_refused(rows, text):
    """Of a Transformers model, or of another rank: the same ids are fed to it."""
    model, replay, inputs, routes = routed()
    with pytest.raises(mr.AlignmentError, match=text), replay.replay(dataclasses.replace(routes[0], row_order=rows)):
        call(model, inputs[0])


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
        mr.RouteTrace(trace.token_ids, trace.routed_experts.astype(dtype), trace.layers, num_experts=8)
        for trace in as_traces(routes[0], inputs[0])
    ]
    batch = mr.RouteBatch.from_traces(traces, layout_of(inputs[0]))
    assert batch.routed_experts.dtype == torch.uint8
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
