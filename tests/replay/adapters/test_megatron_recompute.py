"""Megatron-Core's full recomputation: backwards that do not start at the model's outputs find their routes, or fail."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_replay as mr
from moe_replay.errors import ReplayStateError, UnsupportedRouterError
from tests.distributed.megatron_models import FULL, move_routers
from tests.models import assert_same_gradients, gradients
from tests.replay.adapters.megatron_routers import build, call, random_ids, routed

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.usefixtures("one_rank")

KINDS = {
    "each layer": FULL,
    "two layers": FULL | {"recompute_num_layers": 2},
    "block": FULL | {"recompute_method": "block"},
}


class Pair:
    """A model that recomputes, and the same one that does not, whose gradients are expected."""

    def __init__(self, kind: str) -> None:
        self.model, self.replay, self.inputs, self.routes = routed(**KINDS[kind])
        self.plain = build()
        move_routers(self.plain)
        self.plain_replay = mr.attach(self.plain)

    def expected(self) -> dict[str, torch.Tensor]:
        """Gradients of the plain model, by an ordinary backward."""
        with self.plain_replay.replay(self.routes[0]):
            loss = call(self.plain, self.inputs[0]).mean()
        loss.backward()
        return gradients(self.plain)


def input_of(module: nn.Module, run: Any) -> torch.Tensor:
    """Return what a module is given during a run, taken by a hook."""
    taken: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: taken.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    run()
    hook.remove()
    return taken[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_on_a_hidden_state(kind: str) -> None:
    pair = Pair(kind)

    def found(model: Any, replay: Any) -> dict[str, torch.Tensor]:
        with replay.replay(pair.routes[0]):
            hidden = input_of(model.decoder.final_layernorm, lambda: call(model, pair.inputs[0]))
        hidden.pow(2).mean().backward()
        return gradients(model)

    assert_same_gradients(found(pair.model, pair.replay), found(pair.plain, pair.plain_replay))


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_after_detaching(kind: str) -> None:
    pair = Pair(kind)
    with pair.replay.replay(pair.routes[0]):
        loss = call(pair.model, pair.inputs[0]).mean()
    pair.replay.detach()
    loss.backward()
    assert_same_gradients(gradients(pair.model), pair.expected())


@pytest.mark.parametrize("kind", KINDS)
def test_a_native_forward_in_another_thread_during_the_backward(kind: str) -> None:
    pair = Pair(kind)
    with pair.replay.replay(pair.routes[0]):
        loss = call(pair.model, pair.inputs[0]).mean()

    def native(_: torch.Tensor) -> None:
        def run() -> None:
            with torch.no_grad():
                call(pair.model, pair.inputs[1])

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    pair.model.decoder.final_layernorm.weight.register_hook(native)
    loss.backward()
    assert_same_gradients(gradients(pair.model), pair.expected())


@pytest.mark.parametrize("kind", KINDS)
def test_forward_called_directly(kind: str) -> None:
    pair = Pair(kind)

    def found(model: Any, replay: Any) -> dict[str, torch.Tensor]:
        ids = pair.inputs[0]
        places = torch.arange(ids.shape[1]).expand_as(ids)
        with replay.replay(pair.routes[0], fed_ids=ids):
            loss = model.forward(ids, places, None, labels=ids.roll(-1, 1)).mean()
        loss.backward()
        return gradients(model)

    assert_same_gradients(found(pair.model, pair.replay), found(pair.plain, pair.plain_replay))


def test_a_checkpoint_around_the_model_is_refused() -> None:
    model, replay, inputs, routes = routed()
    ids = inputs[0]
    hidden = torch.zeros(ids.shape[1], len(ids), model.config.hidden_size, requires_grad=True)
    with replay.replay(routes[0], fed_ids=ids):
        output = checkpoint(lambda given: call(model, ids, decoder_input=given), hidden, use_reentrant=True)
    with pytest.raises(ReplayStateError):
        output.mean().backward()


def test_a_hook_registered_later_that_swaps_rows_is_noticed() -> None:
    model, replay, inputs, routes = routed()
    model.register_forward_pre_hook(lambda _, args, kwargs: ((args[0].flip(0), *args[1:]), kwargs), with_kwargs=True)
    with torch.no_grad(), pytest.raises(mr.AlignmentError), replay.replay(routes[0]):
        call(model, inputs[0])


def test_other_tokens_after_a_thread_that_was_refused_are_noticed() -> None:
    model, replay, inputs, routes = routed()
    refused: list[ReplayStateError] = []

    def run() -> None:
        try:
            call(model, inputs[0])
        except ReplayStateError as error:
            refused.append(error)

    with torch.no_grad(), pytest.raises(mr.AlignmentError), replay.replay(routes[0]):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        call(model, inputs[1])
    assert refused


@pytest.mark.parametrize("kind", ["two layers", "block"])
def test_recompute_only_needs_no_context(kind: str) -> None:
    """The bias that is part of the choice alone moves between a forward and its backward."""

    def found(model: Any) -> dict[str, torch.Tensor]:
        biases = [bias for name, bias in model.named_buffers() if name.endswith("expert_bias")]
        for bias in biases:
            bias.copy_(torch.linspace(0.5, -0.5, len(bias)))  # load-balancing losses choose without it
        loss = call(model, random_ids()).mean()
        for bias in biases:
            bias.add_(torch.linspace(-1, 1, len(bias)))
        loss.backward()
        return gradients(model)

    aux = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
    expected = found(build("deepseek", **aux))
    model = build("deepseek", **KINDS[kind] | {"recompute_num_layers": 2}, **aux)  # the first layer is dense
    native = found(model)
    assert any(not torch.allclose(native[name], expected[name], rtol=0.1) for name in expected)
    replay = mr.attach(model, recompute_only=True)
    assert_same_gradients(found(model), expected)
    replay.detach()
    assert_same_gradients(found(model), native)


def test_recompute_only_refuses_routers_that_are_never_replayed() -> None:
    with pytest.raises(UnsupportedRouterError, match="multi-token prediction"):
        mr.attach(build("mtp"), recompute_only=True)
