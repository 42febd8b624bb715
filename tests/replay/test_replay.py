"""The controller: what it records, what it replays, and what it refuses."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_replay as mr
from tests.models import (
    assert_same_gradients,
    gradients,
    loss,
    perturb_routers,
    random_ids,
    tiny_qwen3_moe,
    uncover,
)

LAYERS = (1, 2, 3)  # layer 0 is dense


def recorded(model, replay, ids):
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    return recording.batch()


@pytest.fixture
def model():
    return tiny_qwen3_moe()


@pytest.fixture
def replay(model):
    return mr.attach(model)


# ---- what it does ---------------------------------------------------------------------------------------------------


def test_layers_are_decoder_indices(replay):
    assert replay.layers == LAYERS
    assert replay.topology.layers == LAYERS


def test_an_attached_model_computes_as_before(model):
    ids = random_ids(2, 9)
    before = model(ids).logits
    replay = mr.attach(model)
    assert torch.equal(model(ids).logits, before)
    with replay.record():
        assert torch.equal(model(ids).logits, before)
    replay.detach()
    assert torch.equal(model(ids).logits, before)
    assert all("forward" not in vars(site.module) for site in replay.sites.values())
    mr.attach(model)  # and can be attached again


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_replay_of_a_record_is_bit_identical(experts):
    model = tiny_qwen3_moe(experts_implementation=experts)
    replay = mr.attach(model)
    ids = random_ids(2, 9)
    with replay.record() as recording:
        first = model(ids).logits
    loss(type("O", (), {"logits": first})).backward()
    expected = gradients(model)
    with replay.replay(recording.batch()):
        again = model(ids).logits
    loss(type("O", (), {"logits": again})).backward()
    assert torch.equal(first, again)
    assert_same_gradients(gradients(model), expected)


def test_recorded_routes_are_those_the_routers_report(model, replay):
    ids = random_ids(2, 9)
    reported = {}
    for layer, site in replay.sites.items():
        site.module.register_forward_hook(lambda m, a, out, layer=layer: reported.update({layer: out[2]}))
    batch = recorded(model, replay, ids)
    for slot, layer in enumerate(LAYERS):
        assert torch.equal(batch.routed_experts[slot].long(), reported[layer].view(-1, 2))


def test_replay_pins_the_experts_and_native_routing_would_not(model, replay):
    ids = random_ids(4, 16)
    batch = recorded(model, replay, ids)
    perturb_routers(replay)
    reported = {}
    for layer, site in replay.sites.items():
        site.module.register_forward_hook(lambda m, a, out, layer=layer: reported.update({layer: out[2]}))
    with torch.no_grad(), replay.replay(batch, observe=True) as replaying:
        model(ids)
    differing = []
    for slot, layer in enumerate(LAYERS):
        assert torch.equal(batch.routed_experts[slot].long(), reported[layer].view(-1, 2))
        differing.append(
            (replaying.native().routed_experts[slot].sort(-1)[0] != batch.routed_experts[slot].sort(-1)[0]).any(-1)
        )
    assert torch.stack(differing).float().mean() > 0.5


@settings(max_examples=25)
@given(data=st.data())
def test_rows_without_a_route_are_routed_natively(data):
    """On the first MoE layer, whose inputs do not depend on any route."""
    model = tiny_qwen3_moe(num_hidden_layers=2)
    replay = mr.attach(model)
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    perturb_routers(replay)
    native = recorded(model, replay, ids)
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=18, max_size=18))).reshape(2, 9)
    layout = mr.TokenLayout.padded([9, 9])
    traces = [
        mr.RouteTrace(trace.token_ids, trace.routed_experts, trace.layers, mask, num_experts=8)
        for trace, mask in zip(batch.to_traces(ids.tolist(), layout), valid, strict=True)
    ]
    partial = mr.RouteBatch.from_traces(traces, layout)
    output = []
    replay.sites[1].module.register_forward_hook(lambda m, a, out: output.append(out))
    with torch.no_grad():
        model(ids)
        with replay.replay(batch):
            model(ids)
        with replay.replay(partial):
            model(ids)
    rows = torch.from_numpy(valid.ravel().copy())
    for as_native, as_replayed, mixed in zip(*output, strict=True):
        shape = [-1, *as_native.shape[-1:]]
        expected = torch.where(rows[:, None], as_replayed.view(shape), as_native.view(shape))
        assert torch.equal(mixed.view(shape), expected)
    assert torch.equal(
        output[2][2].view(-1, 2).to(torch.uint8),
        torch.where(rows[:, None], batch.routed_experts[0], native.routed_experts[0]),
    )
    assert partial.coverage is not None
    assert (partial.coverage.replayed, partial.coverage.native) == (valid.sum(), (~valid).sum())


def test_traces_round_trip_through_bytes_padding_and_replay(model, replay):
    sequences = [random_ids(1, n, seed=n)[0].tolist() for n in (5, 9, 1)]
    layout = mr.TokenLayout.padded([5, 9, 1], side="left")
    fed = torch.tensor(layout.fed_token_ids(sequences, pad=0), dtype=torch.long)
    mask = torch.tensor(layout.fed >= 0).long()
    with torch.no_grad(), replay.record() as recording:
        expected = model(fed, attention_mask=mask).logits
    traces = [mr.RouteTrace.from_bytes(t.to_bytes()) for t in recording.traces(layout, sequences, weight_version=3)]
    assert [len(trace) for trace in traces] == [5, 9, 1]
    assert all(trace.layers == LAYERS and trace.num_experts == 8 for trace in traces)
    with torch.no_grad(), replay.replay(mr.RouteBatch.from_traces(traces, layout)):
        assert torch.equal(model(fed, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])


def test_generation_records_every_pass(model, replay):
    ids = random_ids(2, 5)
    with torch.no_grad(), replay.record(every_pass=True) as recording:
        output = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0)
    passes = recording.passes()
    assert [batch.num_rows for batch in passes] == [10, 2, 2, 2]
    together = recorded(model, replay, output[:, :-1])
    by_pass = torch.cat([batch.routed_experts.view(3, 2, -1, 2) for batch in passes], dim=2)
    assert torch.equal(by_pass.sort(-1)[0], together.routed_experts.view(3, 2, 8, 2).sort(-1)[0])


def test_recordings_that_are_not_one_whole_forward_are_refused(model, replay):
    ids, early = random_ids(2, 5), []

    def ask(*_):
        with pytest.raises(mr.errors.ReplayStateError, match=r"nothing was recorded \[layer 2, 3\]"):
            recording.batch()
        early.append(True)

    with torch.no_grad(), replay.record() as recording:
        with pytest.raises(mr.errors.ReplayStateError, match=r"nothing was recorded \[layer 1, 2, 3\]"):
            recording.batch()
        handle = model.model.layers[2].register_forward_pre_hook(ask)
        model(ids)
        handle.remove()
    assert early == [True]
    assert recording.batch().layers == LAYERS

    with torch.no_grad(), replay.record(every_pass=True) as recording:
        model(ids)
        model(ids)
    with pytest.raises(mr.errors.ReplayStateError, match=r"several forwards.*recording\.passes"):
        recording.batch()
    with torch.no_grad(), replay.record(every_pass=True) as recording:
        model(ids)
        model.model.layers[1].mlp(torch.zeros(2, 5, 32))
        with pytest.raises(mr.errors.ReplayStateError, match=r"unequally often.*\{1: 2, 2: 1, 3: 1\}"):
            recording.passes()


def test_native_choices_that_were_not_observed_are_refused(model, replay):
    ids = random_ids(2, 5)
    batch = recorded(model, replay, ids)
    with torch.no_grad(), replay.replay(batch) as replaying:
        model(ids)
    with pytest.raises(mr.errors.ReplayStateError, match="native choices were not observed"):
        replaying.native()


def test_gate_weights_are_recomputed_and_the_router_learns(model, replay):
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    perturb_routers(replay)
    site = replay.sites[1]
    seen = []
    site.module.register_forward_hook(lambda m, a, out: seen.append(out))
    with replay.replay(batch):
        loss(model(ids)).backward()
    logits, weights, _ = seen[0]
    chosen = batch.routed_experts[0].long()
    expected = torch.softmax(logits.double().view(-1, 8).gather(1, chosen), -1)
    torch.testing.assert_close(weights.view(-1, 2).double(), expected, rtol=1e-5, atol=1e-6)
    assert site.module.weight.grad.abs().sum() > 0


# ---- models do not see each other -----------------------------------------------------------------------------------


def test_two_models_in_one_process(model, replay):
    other = tiny_qwen3_moe(seed=5)
    other_replay = mr.attach(other)
    ids = random_ids(2, 9)
    native = other(ids).logits
    batch = recorded(model, replay, ids)
    with torch.no_grad(), replay.replay(batch), other_replay.record() as recording:
        assert torch.equal(other(ids).logits, native)  # the reference inside the policy's context routes natively
        model(ids)
    assert not torch.equal(recording.batch().routed_experts, batch.routed_experts)


def test_a_copy_of_an_attached_model_is_a_model_of_its_own(model, replay):
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    perturb_routers(replay)
    reference = copy.deepcopy(model)
    native = model(ids).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        with replay.replay(batch):
            assert torch.equal(reference(ids).logits, native)  # neither the policy's weights nor its routes
            model(ids)


def test_nothing_keeps_a_model_alive():
    model = tiny_qwen3_moe()
    replay = mr.attach(model)
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    with replay.replay(batch):
        loss(model(ids)).backward()
    gone = weakref.ref(model)
    del model, replay
    gc.collect()
    assert gone() is None


# ---- what it refuses ------------------------------------------------------------------------------------------------


def test_other_tokens_are_refused_before_the_forward_runs(model, replay):
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    ran = []
    model.model.layers[0].register_forward_hook(lambda *args: ran.append(1))
    moved = ids.clone()
    moved[1, 4] += 1
    with pytest.raises(mr.AlignmentError, match=r"another token .*row 1, column 4"), replay.replay(batch):
        model(moved)
    with pytest.raises(mr.AlignmentError, match="another shape"), replay.replay(batch):
        model(ids[:, :-1])
    with pytest.raises(mr.AlignmentError, match="another shape"), replay.replay(batch):
        model(ids.T)
    assert not ran


def test_wrong_tokens_name_sample_and_position(model, replay):
    sequences = [random_ids(1, n, seed=n)[0].tolist() for n in (5, 9)]
    layout = mr.TokenLayout.padded([5, 9], side="left")
    fed = torch.tensor(layout.fed_token_ids(sequences, pad=0), dtype=torch.long)
    with torch.no_grad(), replay.record() as recording:
        model(fed)
    batch = mr.RouteBatch.from_traces(recording.traces(layout, sequences), layout)
    fed[0, 6] = 96 if fed[0, 6] != 96 else 95
    with pytest.raises(mr.AlignmentError) as caught, replay.replay(batch):
        model(fed)
    assert (caught.value.sample, caught.value.token) == (0, 2)
    assert "token id" in str(caught.value)


def test_embeddings_need_the_ids_they_were_made_from(model, replay):
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    embeddings = model.model.embed_tokens(ids)
    with (
        torch.no_grad(),
        pytest.raises(mr.AlignmentError, match=r"not fed token ids.*fed_ids="),
        replay.replay(batch),
    ):
        model(inputs_embeds=embeddings)
    with torch.no_grad(), replay.replay(batch, fed_ids=ids):
        model(inputs_embeds=embeddings)
    with pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch, fed_ids=ids.flip(1)):
        model(inputs_embeds=embeddings)


def test_routes_of_another_layer_set_are_refused(model, replay):
    ids = random_ids(2, 9)
    layout = mr.TokenLayout.padded([9, 9])
    shifted = [
        mr.RouteTrace(trace.token_ids, trace.routed_experts, (0, 1, 2), num_experts=8)
        for trace in recorded(model, replay, ids).to_traces(ids.tolist(), layout)
    ]
    with (
        pytest.raises(mr.AlignmentError, match=r"expected layers \[1, 2, 3\], found layers \[0, 1, 2\]"),
        replay.replay(mr.RouteBatch.from_traces(shifted, layout)),
    ):
        model(ids)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 16}, "chosen from another number of experts"),
        ({"num_experts_per_tok": 3}, "another number of experts per token"),
    ],
)
def test_routes_of_another_router_are_refused(model, replay, change, text):
    other = tiny_qwen3_moe(**change)
    batch = recorded(other, mr.attach(other), random_ids(2, 9))
    with pytest.raises(mr.AlignmentError, match=text), replay.replay(batch):
        model(random_ids(2, 9))


def test_a_layer_the_engine_cannot_capture_must_be_declared(model, replay):
    ids = random_ids(2, 9)
    layout = mr.TokenLayout.padded([9, 9])
    short = [t.select_layers((1, 3)) for t in recorded(model, replay, ids).to_traces(ids.tolist(), layout)]
    with (
        pytest.raises(mr.AlignmentError, match="with_uncaptured_layers"),
        replay.replay(mr.RouteBatch.from_traces(short, layout)),
    ):
        model(ids)
    declared = mr.RouteBatch.from_traces([trace.with_uncaptured_layers((2,)) for trace in short], layout)
    with torch.no_grad(), replay.replay(declared):
        model(ids)
    assert declared.coverage is not None
    assert declared.coverage.replayed_in_layer == (18, 0, 18)


def test_a_context_without_a_forward_is_refused(model, replay):
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    with pytest.raises(mr.errors.ReplayStateError, match=r"this replay \[layer 1, 2, 3\]"), replay.replay(batch):
        pass
    with pytest.raises(mr.errors.ReplayStateError, match="did not run inside this record"), replay.record():
        pass


def test_a_second_forward_in_one_context_is_refused(model, replay):
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    with torch.no_grad(), pytest.raises(mr.errors.ReplayStateError, match=r"twice \[layer 1\]"), replay.replay(batch):
        model(ids)
        model(ids)
    with torch.no_grad(), pytest.raises(mr.errors.ReplayStateError, match="twice"), replay.record():
        model(ids)
        model(ids)


@pytest.mark.parametrize("inner", ["record", "replay"])
@pytest.mark.parametrize("outer", ["record", "replay"])
def test_nesting_is_refused_and_the_outer_context_goes_on(model, replay, outer, inner):
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)

    def opened(kind):
        return replay.record() if kind == "record" else replay.replay(batch)

    with torch.no_grad(), opened(outer):
        with pytest.raises(mr.errors.ReplayStateError, match="opened inside"), opened(inner):
            pass
        model(ids)


def test_a_second_thread_is_refused(model, replay):
    ids = random_ids(2, 9)
    batch = recorded(model, replay, ids)
    caught = []

    def run():
        try:
            with torch.no_grad():
                model(ids)
        except mr.errors.ReplayStateError as error:
            caught.append(error)

    with torch.no_grad(), replay.replay(batch):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        model(ids)
    assert "another thread" in str(caught[0])


def test_an_exception_leaves_the_model_clean(model, replay):
    ids = random_ids(2, 9)
    native = model(ids).logits
    batch = recorded(model, replay, ids)
    perturb_routers(replay)
    moved = model(ids).logits
    assert not torch.equal(native, moved)

    def fail(*args):
        raise RuntimeError("planted")

    handle = model.model.layers[2].register_forward_hook(fail)
    for context in (lambda: replay.replay(batch), replay.record):
        with pytest.raises(RuntimeError, match="planted"), context():
            model(ids)
    handle.remove()
    assert torch.equal(model(ids).logits, moved)
    with torch.no_grad(), replay.replay(batch):
        model(ids)


def test_attaching_twice_is_refused(model, replay):
    with pytest.raises(mr.errors.ReplayStateError, match="attached already"):
        mr.attach(model)
    replay.detach()
    mr.attach(model)


def test_rows_that_the_router_does_not_see_are_refused(model, replay):
    """A layout that misses what happens inside the model, such as sequence parallelism."""
    ids = random_ids(2, 8)
    layout = mr.TokenLayout.padded([8, 8])
    traces = recorded(model, replay, ids).to_traces(ids.tolist(), layout)
    batch = mr.RouteBatch.from_traces(traces, layout.sequence_parallel(0, 2))
    with pytest.raises(mr.AlignmentError, match=r"expected 8 rows, found 16 rows"), replay.replay(batch):
        model(ids)


def test_a_partly_covered_batch_counts_what_is_missing(model, replay):
    ids = random_ids(2, 9)
    batch = uncover(recorded(model, replay, ids), every=3)
    assert batch.coverage is not None
    assert (batch.coverage.token_rows, batch.coverage.replayed, batch.coverage.native) == (18, 36, 18)
