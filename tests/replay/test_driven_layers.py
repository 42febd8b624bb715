"""A trainer that drives decoder layers itself: each keeps the pass it was computed in, whatever runs after it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_replay.errors import ReplayStateError
from tests.models import assert_same_gradients, gradients
from tests.replay.test_recompute import expected_gradients, routed_model

MASK = torch.full((1, 1, 7, 7), float("-inf")).triu(1)


def driven(model, ids, use_reentrant=True, prepare=lambda hidden: hidden, rotary=None):
    """The hidden states after the last decoder layer, each layer in a checkpoint; no module around the layers runs."""
    hidden = model.model.embed_tokens(ids)
    positions = torch.arange(ids.shape[1])[None]
    rotary = rotary or model.model.rotary_emb(hidden, positions)
    mask = MASK
    for layer in model.model.layers:

        def run(hidden, layer=layer):
            out = layer(prepare(hidden), attention_mask=mask, position_embeddings=rotary, position_ids=positions)
            return out[0] if isinstance(out, tuple) else out

        hidden = checkpoint(run, hidden, use_reentrant=use_reentrant)
    return hidden


def finish(model, hidden):
    return model.lm_head(model.model.norm(hidden)).float().pow(2).mean()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("head_in", ["own context", "no context", "another context"])
def test_head_of_driven_layers(head_in, use_reentrant):
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    with replay.replay(routes[0], fed_ids=inputs[0]):
        hidden = driven(model, inputs[0], use_reentrant)
        if head_in == "own context":
            total = finish(model, hidden)
    if head_in == "no context":
        total = finish(model, hidden)
    elif head_in == "another context":
        with replay.replay(routes[1], fed_ids=inputs[1]):
            total = finish(model, hidden)
            driven(model, inputs[1], use_reentrant)
    total.backward()
    assert_same_gradients(gradients(model), expected[0])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_micro_batches_whose_heads_come_last(order):
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    hidden = []
    for i in (0, 1):
        with replay.replay(routes[i], fed_ids=inputs[i]):
            hidden.append(driven(model, inputs[i]))
    losses = [finish(model, one) for one in hidden]
    for i in order:
        losses[i].backward()
        assert_same_gradients(gradients(model), expected[i])


def test_the_whole_decoder_in_a_reentrant_checkpoint():
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    with replay.replay(routes[0], fed_ids=inputs[0]):
        embedded = model.model.embed_tokens(inputs[0])
        hidden = checkpoint(
            lambda embedded: model.model(inputs_embeds=embedded).last_hidden_state, embedded, use_reentrant=True
        )
    loss = model.lm_head(hidden).float().pow(2).mean()
    loss.backward()
    assert_same_gradients(gradients(model), expected[0])


@pytest.mark.parametrize("head_in", ["no context", "another context"])
def test_a_changed_tensor_outside_its_context_is_refused(head_in):
    """Inputs and outputs of the recomputed layer are not tensors of one forward alone: nothing names its pass."""
    model, replay, inputs, routes = routed_model()
    rotary = model.model.rotary_emb(torch.zeros(1), torch.arange(7)[None])  # the same for all micro-batches
    with replay.replay(routes[1], fed_ids=inputs[1]):
        waiting = finish(model, driven(model, inputs[1], prepare=torch.clone, rotary=rotary))
    with replay.replay(routes[0], fed_ids=inputs[0]):
        hidden = driven(model, inputs[0], prepare=torch.clone, rotary=rotary)
    if head_in == "no context":
        total = finish(model, hidden * 2)
    else:
        with replay.replay(routes[1], fed_ids=inputs[1]):
            total = finish(model, hidden * 2)
            driven(model, inputs[1], prepare=torch.clone, rotary=rotary)
    with pytest.raises(ReplayStateError, match="whose forward is not known"):
        total.backward()
    waiting.backward()


def test_the_same_embeddings_in_two_contexts():
    model, replay, inputs, routes = routed_model()
    expected = expected_gradients(model, replay, inputs, routes)
    ids = inputs[0]
    hidden, losses = model.model.embed_tokens(ids), []
    model.model.embed_tokens.forward = lambda ids: hidden
    with replay.replay(routes[0], fed_ids=ids):
        losses.append(finish(model, driven(model, ids)))
    with replay.record() as recording:
        losses.append(finish(model, driven(model, ids)))
    recording.batch()
    losses[0].backward(retain_graph=True)
    assert_same_gradients(gradients(model), expected[0])
