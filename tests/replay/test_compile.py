"""`torch.compile`: one graph, no breaks, no recompilation when the routes change, and the same numbers."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import moe_replay as mr
from tests.combinations import with_thorough, with_whole_runs
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

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def two_sparse_layers():
    return tiny_qwen3_moe(num_hidden_layers=2, mlp_only_layers=[], experts_implementation="batched_mm")


@pytest.mark.whole_runs
def test_recording_and_replaying_compile_to_one_graph_each():
    model = two_sparse_layers()
    replay = mr.attach(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    recorded, plain = [], []
    with torch.no_grad():
        for step in range(STEPS):
            with replay.record() as recording:
                plain.append(compiled(random_ids(2, 7, seed=step)).logits)
            recorded.append(recording.batch())
        recorded_by = counter.frame_count
        assert recorded_by <= 2  # the model, and the hook on it, which copies the ids
        for step in range(STEPS):
            with replay.record() as again:
                assert torch.equal(model(random_ids(2, 7, seed=step)).logits, plain[step])
            assert torch.equal(again.batch().routed_experts, recorded[step].routed_experts)

        perturb_routers(replay)
        for step in range(STEPS):
            # the covered share changes from step to step, which must not compile anew either
            batch = recorded[step] if step % 2 else uncover(recorded[step], every=2 + step)
            with replay.replay(batch):
                found = compiled(random_ids(2, 7, seed=step)).logits
            with replay.replay(batch):
                assert torch.equal(model(random_ids(2, 7, seed=step)).logits, found)
        assert counter.frame_count <= recorded_by + 2


def test_training_step_compiles():
    model = two_sparse_layers().train()
    replay = mr.attach(model)
    batches = []
    for step in range(STEPS):
        with torch.no_grad(), replay.record() as recording:
            model(random_ids(2, 7, seed=step))
        batches.append(recording.batch())
    perturb_routers(replay)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(STEPS):
        ids = random_ids(2, 7, seed=step)
        with replay.replay(batches[step]):
            loss(compiled(ids)).backward()
        found = gradients(model)
        with replay.replay(batches[step]):
            loss(model(ids)).backward()
        for name, expected in gradients(model).items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)
    assert counter.frame_count <= 2


@pytest.mark.whole_runs
def test_compiled_layers_are_recomputed_with_their_own_routes():
    """Regional compilation: each decoder layer compiled, checkpointing around it in eager mode."""
    model = two_sparse_layers().train()
    replay = mr.attach(model)
    inputs = [random_ids(2, 7, seed=i) for i in range(3)]
    batches = recorded(replay, model, inputs)
    expected = []
    for ids, batch in zip(inputs, batches, strict=True):
        with replay.replay(batch):
            loss(model(ids)).backward()
        expected.append(gradients(model))
    for layer in model.model.layers:
        layer.mlp.compile(backend="aot_eager", fullgraph=True)
    model.enable_input_require_grads()
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        losses = []
        for ids, batch in zip(inputs, batches, strict=True):
            with replay.replay(batch):
                losses.append(loss(model(ids)))
        for i in (2, 0, 1):
            losses[i].backward()
            found = gradients(model)
            for name, gradient in expected[i].items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name", with_whole_runs(with_thorough(CHECKPOINTS, {"wrapper", "wrapper-reentrant"}), {"transformers-reentrant"})
)
def test_a_compiled_model_recomputes_with_its_own_routes(name):
    """The whole model compiled around checkpointed layers: hooks that tie the backward to its pass run eagerly."""
    model = two_sparse_layers().train()
    replay = mr.attach(model)
    ids = random_ids(2, 7)
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    perturb_routers(replay)
    with replay.replay(recording.batch()):
        loss(model(ids)).backward()
    expected = gradients(model)
    CHECKPOINTS[name](model)
    compiled = torch.compile(model, backend="aot_eager")
    with replay.replay(recording.batch()):
        one = loss(compiled(ids))
    with torch.no_grad(), replay.replay(recording.batch()):
        model(ids)
    one.backward()
    found = unwrapped(gradients(model))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_compiled_forward_fed_other_tokens_is_refused():
    model = two_sparse_layers()
    replay = mr.attach(model)
    with torch.no_grad(), replay.record() as recording:
        model(random_ids(2, 7))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with (
        torch.no_grad(),
        pytest.raises(mr.AlignmentError, match="another token"),
        replay.replay(recording.batch()),
    ):
        compiled(random_ids(2, 7).flip(1))


@pytest.mark.whole_runs
def test_a_checkpoint_around_a_compiled_model_is_refused():
    """Compiled code has no hooks on its tensors, so its recomputation cannot find its routes."""
    model = tiny_qwen3_moe(num_hidden_layers=2, experts_implementation="batched_mm").train()
    replay = mr.attach(model)
    ids = random_ids(2, 7)
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    compiled = torch.compile(model, backend="eager")
    for use_reentrant in (False, True):
        embeddings = model.model.embed_tokens(ids).detach().requires_grad_()
        with replay.replay(recording.batch(), fed_ids=ids):
            logits = checkpoint(lambda e: compiled(inputs_embeds=e).logits, embeddings, use_reentrant=use_reentrant)
        with pytest.raises(mr.errors.ReplayStateError, match="cannot be traced to a forward"):
            logits.pow(2).mean().backward()
        loss(compiled(ids)).backward()  # a native step, as before


def test_a_compiled_forward_of_another_thread_is_refused():
    model = tiny_qwen3_moe(num_hidden_layers=2, experts_implementation="batched_mm")
    replay = mr.attach(model)
    compiled = torch.compile(model, backend="eager")
    refused = []

    def run():
        try:
            with torch.no_grad():
                compiled(random_ids(2, 7, seed=1))
        except mr.errors.ReplayStateError as error:
            refused.append(error)

    with torch.no_grad(), replay.record(every_pass=True) as recording:
        compiled(random_ids(2, 7))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "another thread" in str(refused[0])
    assert len(recording.passes()) == 1


def compiled_layers():
    """A model in training whose sparse blocks are compiled, recorded routes, and routers that have moved since."""
    model = tiny_qwen3_moe(num_hidden_layers=2, experts_implementation="batched_mm").train()
    replay = mr.attach(model)
    ids = random_ids(2, 7)
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    perturb_routers(replay)
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager", fullgraph=True)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model, replay, ids, recording.batch()


@pytest.mark.parametrize("called", ["model", "decoder"])
def test_an_aborted_backward_of_compiled_layers_leaves_no_routes_behind(called):
    model, replay, ids, batch = compiled_layers()
    with torch.no_grad():
        native = model(ids).logits
    with replay.replay(batch):
        one = loss(model(ids))
    abort_backward(one, model.model.layers[0].self_attn.q_proj.weight)
    with torch.no_grad():
        if called == "model":
            assert torch.equal(model(ids).logits, native)
        else:  # past every hook that sees a forward start
            assert torch.equal(model.lm_head(model.model.forward(ids).last_hidden_state), native)


def test_compiled_layers_in_another_thread_during_a_backward():
    model, replay, ids, batch = compiled_layers()
    with torch.no_grad():
        native = model(ids).logits
    with replay.replay(batch):
        one = loss(model(ids))
    one.backward(retain_graph=True)
    expected, found = gradients(model), []

    def forward():
        with torch.no_grad():
            found.append(model(ids).logits)

    def start(*args):
        if not found and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()

    model.model.layers[1].self_attn.register_forward_hook(start)  # runs in the recomputation, before the sparse block
    one.backward()
    assert torch.equal(found[0], native)
    assert_same_gradients(gradients(model), expected)
