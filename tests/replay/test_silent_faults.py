"""Faults that must not be silent: tokens that are swapped between check and use, backwards that bypass the outputs."""

from __future__ import annotations

import copy
import functools
import pickle
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import moe_replay as mr
from tests.models import assert_same_gradients, gradients, loss, perturb_routers, random_ids, tiny_qwen3_moe
from tests.replay.checkpointing import CHECKPOINTS, unwrapped

IDS = random_ids(2, 9)
OTHER = random_ids(2, 9, seed=1)


def recorded(model, replay, ids=IDS):
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    return recording.batch()


@pytest.fixture
def model():
    return tiny_qwen3_moe()


@pytest.fixture(params=[False, True], ids=["", "deferred"])
def replay(model, request, monkeypatch):
    """A controller, and one whose errors about tokens come when the context closes."""
    controller = mr.attach(model)
    if request.param:
        monkeypatch.setattr(controller, "replay", functools.partial(controller.replay, deferred=True))
    return controller


@pytest.fixture
def batch(model, replay):
    return recorded(model, replay)


def trained(name, **config):
    """A checkpointed model in training, its controller, routes, and the gradients that replay must give."""
    model = tiny_qwen3_moe(**config).train()
    replay = mr.attach(model)
    batch = recorded(model, replay)
    perturb_routers(replay)
    return model, replay, batch


# ---- tokens: compared in every forward ------------------------------------------------------------------------------


def fail(*args):
    raise RuntimeError("planted")


@pytest.mark.parametrize("context", ["replay", "record"])
def test_tokens_after_a_forward_that_failed(model, replay, batch, context):
    handle = model.model.layers[0].register_forward_pre_hook(fail)
    opened = replay.replay(batch) if context == "replay" else replay.record()
    if context == "replay":
        with torch.no_grad(), pytest.raises(mr.AlignmentError, match="another token"), opened:
            with pytest.raises(RuntimeError, match="planted"):
                model(IDS)
            handle.remove()
            model(OTHER)
        return
    with torch.no_grad(), opened as recording:
        with pytest.raises(RuntimeError, match="planted"):
            model(IDS)
        handle.remove()
        model(OTHER)
    assert torch.equal(recording.batch().fed_token_ids, OTHER.int())


def test_embeddings_after_a_forward_that_failed(model, replay, batch):
    handle = model.model.layers[0].register_forward_pre_hook(fail)
    embeddings = model.model.embed_tokens(OTHER)
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="not fed token ids"), replay.replay(batch):
        with pytest.raises(RuntimeError, match="planted"):
            model(IDS)
        handle.remove()
        model(inputs_embeds=embeddings)


def test_other_tokens_than_those_passed(model, replay, batch):
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch, fed_ids=IDS):
        model(OTHER)
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="passed as fed_ids"), replay.record(fed_ids=IDS):
        model(OTHER)


def test_tokens_after_a_refused_thread(model, replay, batch):
    refused = []

    def run():
        try:
            model(IDS)
        except mr.errors.ReplayStateError as error:
            refused.append(error)

    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        model(OTHER)
    assert "another thread" in str(refused[0])


@pytest.mark.parametrize("inner", [False, True], ids=["model", "decoder"])
def test_a_later_hook_that_swaps_rows(model, replay, batch, inner):
    def swap(module, args, kwargs):
        if "input_ids" in kwargs:
            return args, kwargs | {"input_ids": kwargs["input_ids"].flip(0)}
        return (args[0].flip(0), *args[1:]), kwargs

    (model.model if inner else model).register_forward_pre_hook(swap, with_kwargs=True)
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch):
        model(IDS)
    with torch.no_grad(), replay.record() as recording:
        model(IDS)
    assert torch.equal(recording.batch().fed_token_ids, IDS.flip(0).int())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_later_hook_that_swaps_rows_in_place(model, replay, batch, mode):
    def swap(module, args):
        args[0].copy_(args[0].flip(0))

    model.register_forward_pre_hook(swap)
    with mode(), pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch):
        model(IDS.clone())


@pytest.mark.parametrize("context", ["replay", "record"])
def test_a_forward_that_stopped_half_way(model, replay, batch, context):
    model.model.layers[2].register_forward_pre_hook(fail)
    opened = replay.replay(batch) if context == "replay" else replay.record()
    with (
        torch.no_grad(),
        pytest.raises(mr.errors.ReplayStateError, match=r"did not run .*\[layer 2, 3\]"),
        opened,
        pytest.raises(RuntimeError, match="planted"),
    ):
        model(IDS)


def test_the_decoder_called_as_a_module(model, replay, batch):
    with torch.no_grad(), replay.replay(batch):
        model.model(IDS)
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch):
        model.model(OTHER)


def test_tokens_that_were_refused_are_refused_again(model):
    """Also further in, where a tensor that was compared before needs no second comparison."""
    replay = mr.attach(model)
    batch = recorded(model, replay)
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch):
        with pytest.raises(mr.AlignmentError, match="another token"):
            model(OTHER)
        model.model(OTHER)


def test_tokens_that_were_compared_without_a_wait_are_refused_in_the_end(model):
    """Also those of a forward behind which the right ones are fed."""
    replay = mr.attach(model)
    batch, ran = recorded(model, replay), []
    model.model.layers[-1].register_forward_hook(lambda *_: ran.append(True))
    refused = pytest.raises(mr.AlignmentError, match="another token")
    with torch.no_grad(), refused, replay.replay(batch, deferred=True):
        model(OTHER)
        assert ran == [True]

    def right_ones(module, args, kwargs):
        return args, kwargs | {"input_ids": IDS}

    model.model.register_forward_pre_hook(right_ones, with_kwargs=True)
    with torch.no_grad(), refused, replay.replay(batch, deferred=True):
        model(OTHER)


class FromEmbeddings(torch.nn.Module):
    """A model whose first argument is not its token ids."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, embeddings):
        return self.model(inputs_embeds=embeddings)


def test_embeddings_are_not_taken_for_token_ids():
    model = FromEmbeddings(tiny_qwen3_moe())
    replay = mr.attach(model)
    embeddings = model.model.model.embed_tokens(IDS)
    with torch.no_grad(), replay.record() as recording:
        model(embeddings)
    assert recording.batch().fed_token_ids is None
    with torch.no_grad(), replay.record(fed_ids=IDS) as recording:
        model(embeddings)
    with torch.no_grad(), replay.replay(recording.batch(), fed_ids=IDS):
        model(embeddings)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_recorded_ids_are_a_copy(model, replay, dtype):
    buffer = IDS.clone().to(dtype)
    with torch.no_grad(), replay.record() as recording:
        model(buffer)
    early = recording.batch()
    buffer.copy_(OTHER)
    assert torch.equal(recording.batch().fed_token_ids, IDS.int())
    assert torch.equal(early.fed_token_ids, IDS.int())


@pytest.mark.slow
@pytest.mark.parametrize("every_pass", [False, True])
def test_recorded_ids_of_a_compiled_forward_are_a_copy(model, replay, every_pass):
    compiled = torch.compile(model, backend="eager")
    buffer = IDS.clone()
    with torch.no_grad(), replay.record(every_pass=every_pass) as recording:
        compiled(buffer)
        buffer.copy_(OTHER)
        if every_pass:
            compiled(buffer)
    fed = [one.fed_token_ids for one in recording.passes()] if every_pass else [recording.batch().fed_token_ids]
    assert all(torch.equal(found, ids.int()) for found, ids in zip(fed, (IDS, OTHER), strict=False))


@pytest.mark.slow
def test_a_compiled_forward_is_compared_with_the_ids_that_it_was_fed(model, replay):
    with torch.no_grad(), replay.record() as recording:
        model(IDS)
    compiled, buffer = torch.compile(model, backend="eager"), OTHER.clone()
    with pytest.raises(mr.AlignmentError, match="another token"), torch.no_grad(), replay.replay(recording.batch()):
        compiled(buffer)
        buffer.copy_(IDS)


# ---- claims about a recording ---------------------------------------------------------------------------------------


def test_traces_of_another_claim_are_refused(model, replay):
    sequences = [random_ids(1, n, seed=i)[0].tolist() for i, n in enumerate((5, 5, 9))]
    layout = mr.TokenLayout.padded([5, 5, 9], side="left")
    fed = torch.tensor(layout.fed_token_ids(sequences, pad=0), dtype=torch.long)
    with torch.no_grad(), replay.record() as recording:
        model(fed)
    recording.traces(layout, sequences)
    claims = {
        "padding": (mr.TokenLayout.padded([5, 5, 9]), sequences),
        "order": (layout, [sequences[1], sequences[0], sequences[2]]),
        "invented": (layout, [[1] * 5, *sequences[1:]]),
        "rows": (layout.sequence_major(), sequences),
    }
    for claimed, ids in claims.values():
        with pytest.raises(mr.AlignmentError):
            recording.traces(claimed, ids)
        with pytest.raises(mr.AlignmentError):
            recording.batch().to_traces(ids, claimed)
    assert len(recording.traces(claims["padding"][0], sequences, unverified=True)) == 3


def test_batches_of_traces_keep_their_claim(batch):
    layout = mr.TokenLayout.padded([9, 9])
    made = mr.RouteBatch.from_traces(batch.to_traces(IDS.tolist(), layout), layout)
    with pytest.raises(mr.AlignmentError, match="another token"):
        made.to_traces(OTHER.tolist(), layout)
    with pytest.raises(mr.AlignmentError, match="order"):
        made.to_traces(IDS.tolist(), layout.sequence_major())


# ---- tokens that no trace has ---------------------------------------------------------------------------------------


def test_tokens_hidden_in_padding(model, replay, batch):
    traces = [trace[:4] for trace in batch.to_traces(IDS.tolist(), mr.TokenLayout.padded([9, 9]))]
    cut = mr.RouteBatch.from_traces(traces, mr.TokenLayout.padded([4, 4], width=9))
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="tokens that no trace has"), replay.replay(cut):
        model(IDS)
    with torch.no_grad(), replay.replay(cut, allow_unknown_tokens=True) as replaying:
        model(IDS)
    assert replaying.unknown_tokens >= 9  # of 10; one id may be taken for that of padding
    embeddings = model.model.embed_tokens(IDS)
    with torch.no_grad(), replay.replay(cut, fed_ids=IDS, allow_unknown_tokens=True) as replaying:
        model(inputs_embeds=embeddings)
    assert replaying.unknown_tokens >= 9
    padded = IDS.clone()
    padded[:, 4:] = 0
    with torch.no_grad(), replay.replay(cut) as replaying:
        model(padded)
    assert replaying.unknown_tokens == 0


def test_the_attention_mask_says_what_padding_is(model, replay, batch):
    traces = [trace[:4] for trace in batch.to_traces(IDS.tolist(), mr.TokenLayout.padded([9, 9]))]
    cut = mr.RouteBatch.from_traces(traces, mr.TokenLayout.padded([4, 4], width=9))
    mask = torch.zeros_like(IDS)
    mask[:, :4] = 1
    with torch.no_grad(), replay.replay(cut):
        model(IDS, attention_mask=mask)
    mask[1, 4] = 1
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match=r"1 tokens, .*row 1, column 4"), replay.replay(cut):
        model(IDS, attention_mask=mask)


def test_a_batch_of_no_tokens(model, replay):
    empty = [mr.RouteTrace.uncovered([], (1, 2, 3), 2, num_experts=8) for _ in range(2)]
    made = mr.RouteBatch.from_traces(empty, mr.TokenLayout.padded([0, 0], width=9))
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="no tokens"), replay.replay(made):
        model(torch.zeros_like(IDS))


def test_routes_recorded_without_ids(model, replay):
    embeddings = model.model.embed_tokens(IDS)
    with torch.no_grad(), replay.record() as recording:
        model(inputs_embeds=embeddings)
    blind = recording.batch()
    with torch.no_grad(), pytest.raises(mr.AlignmentError, match="does not know its token ids"), replay.replay(blind):
        model(inputs_embeds=model.model.embed_tokens(OTHER))
    with torch.no_grad(), replay.replay(blind, unverified=True):
        model(inputs_embeds=embeddings)
    with pytest.raises(mr.AlignmentError, match="does not know its token ids"):
        blind.to_traces(IDS.tolist(), mr.TokenLayout.padded([9, 9]))


def test_every_pass_knows_its_ids(model, replay):
    with torch.no_grad(), replay.record(every_pass=True) as recording:
        model(IDS)
        model(OTHER)
    first, second = recording.passes()
    assert torch.equal(first.fed_token_ids, IDS.int())
    assert torch.equal(second.fed_token_ids, OTHER.int())


# ---- backwards that bypass the outputs ------------------------------------------------------------------------------

REENTRANT = ["transformers-reentrant", "wrapper-reentrant"]


def hidden_loss(model, layer):
    """The loss on what enters a module, taken by a hook, as a list that the forward fills."""
    taken = []
    handle = layer.register_forward_pre_hook(lambda m, args: taken.append(args[0]))
    return taken, handle


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_loss_on_a_hidden_state(name):
    model, replay, batch = trained(name)

    def backward():
        taken, handle = hidden_loss(model, model.model.norm)
        with replay.replay(batch):
            model(IDS)
        handle.remove()
        taken[0].pow(2).mean().backward()
        return gradients(model)

    expected = backward()
    CHECKPOINTS[name](model)
    assert_same_gradients(unwrapped(backward()), expected)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_detached_between_forward_and_backward(name):
    model, replay, batch = trained(name)
    with replay.replay(batch):
        loss(model(IDS)).backward()
    expected = gradients(model)
    CHECKPOINTS[name](model)
    with replay.replay(batch):
        one = loss(model(IDS))
    replay.detach()
    one.backward()
    assert_same_gradients(unwrapped(gradients(model)), expected)
    assert all("forward" not in vars(site.module) for site in replay.sites.values())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_decoder_called_directly(name):
    model, replay, batch = trained(name)

    def backward():
        with replay.replay(batch, fed_ids=IDS):
            hidden = model.model.forward(IDS).last_hidden_state
        hidden.pow(2).mean().backward()
        return gradients(model)

    expected = backward()
    CHECKPOINTS[name](model)
    assert_same_gradients(unwrapped(backward()), expected)


def test_a_reentrant_checkpoint_around_the_whole_model():
    model, replay, batch = trained("none")
    embeddings = model.model.embed_tokens(IDS).detach().requires_grad_()
    with replay.replay(batch, fed_ids=IDS):
        logits = checkpoint(lambda e: model(inputs_embeds=e).logits, embeddings, use_reentrant=True)
    with pytest.raises(mr.errors.ReplayStateError, match="whose forward is not known"):
        logits.pow(2).mean().backward()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_native_forward_in_another_thread_during_a_backward(name):
    model, replay, batch = trained(name)
    with replay.replay(batch):
        loss(model(IDS)).backward()
    expected = gradients(model)
    CHECKPOINTS[name](model)
    with replay.replay(batch):
        one = loss(model(IDS))

    def native(grad):
        def run():
            with torch.no_grad():
                model(OTHER)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    model.model.norm.weight.register_hook(native)  # after the hooks on outputs, before any layer is recomputed
    one.backward()
    assert_same_gradients(unwrapped(gradients(model)), expected)


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_a_copy_made_in_an_open_context_routes_natively(model, replay, batch):
    perturb_routers(replay)
    native = model(IDS).logits
    with torch.no_grad(), replay.replay(batch):
        model(IDS)
        reference = copy.deepcopy(model)
    assert torch.equal(reference(IDS).logits, native)


def test_an_attached_model_is_not_pickled(model, replay):
    with pytest.raises(mr.errors.ReplayStateError, match=r"cannot be pickled.*detach\(\)"):
        pickle.dumps(model)
    replay.detach()
    assert pickle.loads(pickle.dumps(model)).config.num_experts == 8
