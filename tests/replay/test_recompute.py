"""Recomputed layers take the routes of their own micro-batch, whatever the order of forwards and backwards."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch

import moe_replay as mr
from tests.models import (
    assert_same_gradients,
    gradients,
    loss,
    perturb_routers,
    random_ids,
    recorded,
    tiny_qwen3_moe,
    uncover,
)
from tests.replay.checkpointing import CHECKPOINTS, abort_backward, unwrapped

MICRO_BATCHES = 3


def routed_model(**config):
    """A model in training mode, routes recorded for three micro-batches, router weights moved since then."""
    model = tiny_qwen3_moe(**config).train()
    replay = mr.attach(model)
    inputs = [random_ids(2, 7, seed=i) for i in range(MICRO_BATCHES)]
    return model, replay, inputs, recorded(replay, model, inputs)


def expected_gradients(model, replay, inputs, routes):
    """Of each micro-batch alone, without checkpointing."""
    found = []
    for ids, batch in zip(inputs, routes, strict=True):
        with replay.replay(batch):
            loss(model(ids)).backward()
        found.append(gradients(model))
    return found


ORDERS = list(itertools.permutations(range(MICRO_BATCHES)))


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_backward_in_any_order(checkpoint, experts):
    model, replay, inputs, routes = routed_model(experts_implementation=experts)
    expected = expected_gradients(model, replay, inputs, routes)
    CHECKPOINTS[checkpoint](model)
    for order in ORDERS if experts == "eager" else ORDERS[-1:]:  # the order is none of the experts' business
        losses = []
        for ids, batch in zip(inputs, routes, strict=True):
            with replay.replay(batch):
                losses.append(loss(model(ids)))
        for i in order:
            losses[i].backward()
            assert_same_gradients(unwrapped(gradients(model)), expected[i])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_test_would_notice(checkpoint):
    """Were backwards not tied to their passes, recomputed layers would route natively: an error or other gradients."""
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    CHECKPOINTS[checkpoint](model)
    active = replay._active
    active.enter_backward = lambda forward_pass, **_: type(active).enter_backward(active, None)
    with replay.replay(routes[0]):
        one = loss(model(inputs[0]))
    try:
        one.backward()
    except (torch.utils.checkpoint.CheckpointError, RuntimeError):
        return
    found = unwrapped(gradients(model))
    assert any(not torch.equal(found[name], expected[0][name]) for name in expected[0])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_one_forward_one_backward_pipeline(checkpoint):
    """1F1B: forwards and backwards of different micro-batches alternate, with passes without gradient in between."""
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    CHECKPOINTS[checkpoint](model)
    waiting = []
    for i, (ids, batch) in enumerate(zip(inputs, routes, strict=True)):
        with replay.replay(batch):
            waiting.append((i, loss(model(ids))))
        with torch.no_grad(), replay.replay(routes[0]):
            model(inputs[0])  # an evaluation pass that leaves nothing behind
        if len(waiting) == 2:
            first, its_loss = waiting.pop(0)
            its_loss.backward()
            assert_same_gradients(unwrapped(gradients(model)), expected[first])
    for i, its_loss in waiting:
        its_loss.backward()
        assert_same_gradients(unwrapped(gradients(model)), expected[i])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_backward_of_summed_losses(checkpoint):
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    CHECKPOINTS[checkpoint](model)
    total = torch.zeros(())
    for ids, batch in zip(inputs, routes, strict=True):
        with replay.replay(batch):
            total = total + loss(model(ids))
    total.backward()
    for name, gradient in unwrapped(gradients(model)).items():
        torch.testing.assert_close(gradient, sum(one[name] for one in expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_backward_inside_another_context(checkpoint):
    """The backward of one micro-batch while the context of the next is open: each keeps its own routes."""
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    CHECKPOINTS[checkpoint](model)
    with replay.replay(routes[0]):
        first = loss(model(inputs[0]))
    with replay.replay(routes[1]):
        first.backward()
        assert_same_gradients(unwrapped(gradients(model)), expected[0])
        second = loss(model(inputs[1]))
        second.backward()
        assert_same_gradients(unwrapped(gradients(model)), expected[1])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_backward_in_another_thread(checkpoint):
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    CHECKPOINTS[checkpoint](model)
    with replay.replay(routes[0]):
        one = loss(model(inputs[0]))
    thread = threading.Thread(target=one.backward)
    thread.start()
    thread.join()
    assert_same_gradients(unwrapped(gradients(model)), expected[0])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_recorded_forward_is_recomputed_with_its_own_routes(checkpoint):
    """A recording is left as it was by the recomputation of its backward."""
    model, replay, inputs, _ = routed_model()
    with replay.record() as plain:
        loss(model(inputs[0])).backward()
    expected = gradients(model)
    CHECKPOINTS[checkpoint](model)
    with replay.record() as recording:
        one = loss(model(inputs[0]))
    one.backward()
    assert_same_gradients(unwrapped(gradients(model)), expected)
    assert torch.equal(recording.batch().routed_experts, plain.batch().routed_experts)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_native_forward_between_replayed_ones(checkpoint):
    """A forward outside any context routes natively, in its recomputation too."""
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    loss(model(inputs[1])).backward()
    native = gradients(model)
    CHECKPOINTS[checkpoint](model)
    with replay.replay(routes[0]):
        replayed_loss = loss(model(inputs[0]))
    native_loss = loss(model(inputs[1]))
    replayed_loss.backward(retain_graph=True)
    assert_same_gradients(unwrapped(gradients(model)), expected[0])
    native_loss.backward()
    assert_same_gradients(unwrapped(gradients(model)), native)
    replayed_loss.backward()
    assert_same_gradients(unwrapped(gradients(model)), expected[0])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_failed_backward_leaves_no_routes_behind(checkpoint):
    model, replay, inputs, routes = routed_model()
    with torch.no_grad():
        native = model(inputs[1]).logits
    CHECKPOINTS[checkpoint](model)
    with replay.replay(routes[0]):
        one = loss(model(inputs[0]))
    abort_backward(one, model.model.embed_tokens.weight)
    model.zero_grad()
    with torch.no_grad():
        assert torch.equal(model(inputs[1]).logits, native)
    with replay.replay(routes[1]):
        loss(model(inputs[1])).backward()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_rows_without_a_route_are_recomputed_as_they_were(checkpoint):
    """The native choice of an uncovered row is remembered for the recomputation."""
    model, replay, inputs, routes = routed_model()
    partial = uncover(routes[0], every=3)
    with replay.replay(partial):
        loss(model(inputs[0])).backward()
    expected = gradients(model)
    CHECKPOINTS[checkpoint](model)
    with replay.replay(partial):
        one = loss(model(inputs[0]))
    with replay.replay(routes[1]):
        model(inputs[1])
    one.backward()
    assert_same_gradients(unwrapped(gradients(model)), expected)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_recomputation_takes_what_was_taken_and_not_what_would_be_chosen_now(checkpoint):
    """A near-tie may fall the other way the second time: here the routers move between forward and backward."""
    model, replay, inputs, routes = routed_model()
    partial = uncover(routes[0], every=2)
    CHECKPOINTS[checkpoint](model)
    taken = {layer: [] for layer in replay.layers}
    for layer, site in replay.sites.items():
        site.module.register_forward_hook(lambda m, args, out, layer=layer: taken[layer].append(out[2]))
    for context in (lambda: replay.replay(partial), replay.record):
        with context():
            one = loss(model(inputs[0]))
        perturb_routers(replay, seed=2)
        one.backward()
        with torch.no_grad():
            model(inputs[0])  # natively: the routers would choose otherwise now
        for calls in taken.values():
            first, again, native = calls
            assert torch.equal(again, first)
            assert not torch.equal(native, first)
            calls.clear()


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_backward_of_a_native_forward_inside_a_context(checkpoint):
    model, replay, inputs, routes = routed_model()
    loss(model(inputs[1])).backward()
    native = gradients(model)
    expected = expected_gradients(model, replay, inputs, routes)
    CHECKPOINTS[checkpoint](model)
    one = loss(model(inputs[1]))
    with replay.replay(routes[0]):
        one.backward()
        assert_same_gradients(unwrapped(gradients(model)), native)
        loss(model(inputs[0])).backward()
    assert_same_gradients(unwrapped(gradients(model)), expected[0])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_recording_of_several_passes_is_not_recomputed(checkpoint):
    """Each layer keeps the routes of all its passes: which of them a backward belongs to is not known."""
    model, replay, inputs, _ = routed_model()
    CHECKPOINTS[checkpoint](model)
    with replay.record(every_pass=True):
        one = loss(model(inputs[0]))
        model(inputs[1])
    with pytest.raises(mr.errors.ReplayStateError, match="several passes cannot be recomputed"):
        one.backward()


@pytest.mark.parametrize("layer", [1, 3])
def test_a_loss_on_router_logits_alone(layer):
    """They are among the last outputs, in a tuple, and lead past every other tensor that a hook is on."""
    model, replay, inputs, routes = routed_model()

    def backward():
        with replay.replay(routes[0]):
            output = model(inputs[0], output_router_logits=True)
        output.router_logits[layer - 1].pow(2).mean().backward()
        return gradients(model)

    expected = backward()
    CHECKPOINTS["transformers"](model)
    assert_same_gradients(backward(), expected)


def test_nothing_is_kept_of_an_aborted_backward():
    model, replay, inputs, routes = routed_model()
    CHECKPOINTS["transformers-reentrant"](model)
    with replay.replay(routes[0]):
        forward_pass = weakref.ref(replay._active.opened)
        one = loss(model(inputs[0]))
    abort_backward(one, model.model.layers[2].self_attn.q_proj.weight)
    del one
    with torch.no_grad():
        model(inputs[1])
    gc.collect()
    assert forward_pass() is None
    assert replay._active._backwards == {}


def test_an_aborted_backward_after_detaching():
    model, replay, inputs, routes = routed_model()
    CHECKPOINTS["transformers-reentrant"](model)
    with replay.replay(routes[0]):
        one = loss(model(inputs[0]))
    replay.detach()
    abort_backward(one, model.model.layers[2].self_attn.q_proj.weight)
    replay.detach()
    assert all("forward" not in vars(site.module) for site in replay.sites.values())
    mr.attach(model)
