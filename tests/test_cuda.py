"""On a GPU, in bf16: the same promises, and no wait for the device in any layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.integrations.hosts import ReplaySettings
from moe_replay.integrations.step_metrics import StepMetrics
from tests.models import gradients, perturb_routers, random_ids, tiny_qwen3_moe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["grouped_mm", "batched_mm"])
def model(request):
    return tiny_qwen3_moe(experts_implementation=request.param).to("cuda", torch.bfloat16).train()


def recorded(model, replay, ids):
    with torch.no_grad(), replay.record() as recording:
        logits = model(ids).logits
    return recording.batch(), logits


def test_replay_of_a_record_is_bit_identical(model):
    replay = mr.attach(model)
    ids = random_ids(4, 64).cuda()
    batch, logits = recorded(model, replay, ids)
    with torch.no_grad(), replay.replay(batch):
        assert torch.equal(model(ids).logits, logits)


def test_experts_are_pinned_from_a_batch_on_the_host(model):
    replay = mr.attach(model)
    ids = random_ids(4, 64).cuda()
    batch, _ = recorded(model, replay, ids)
    perturb_routers(replay)
    seen = {}
    for layer, site in replay.sites.items():
        site.module.register_forward_hook(lambda m, a, out, layer=layer: seen.update({layer: out[2]}))
    with torch.no_grad(), replay.replay(batch.to("cpu"), observe=True) as replaying:
        model(ids)
    for slot, layer in enumerate(replay.layers):
        assert torch.equal(seen[layer].view(-1, 2).to(torch.uint8), batch.routed_experts[slot])
    assert (replaying.native().routed_experts != batch.routed_experts).any(-1).float().mean() > 0.3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_micro_batches_in_reverse_order(model, use_reentrant):
    """Backward runs in autograd's own threads here."""
    replay = mr.attach(model)
    inputs = [random_ids(2, 32, seed=i).cuda() for i in range(3)]
    batches = [recorded(model, replay, ids)[0] for ids in inputs]
    perturb_routers(replay)
    expected = []
    for ids, batch in zip(inputs, batches, strict=True):
        with replay.replay(batch):
            model(ids).logits.float().pow(2).mean().backward()
        expected.append(gradients(model))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    losses = []
    for ids, batch in zip(inputs, batches, strict=True):
        with replay.replay(batch):
            losses.append(model(ids).logits.float().pow(2).mean())
    for i in (2, 0, 1):
        losses[i].backward()
        for name, gradient in gradients(model).items():
            error = (gradient.float() - expected[i][name].float()).norm() / expected[i][name].float().norm()
            assert error < 0.02, name


def test_no_layer_waits_for_the_device(model):
    """The token ids are compared once for a micro-batch; after that the host runs ahead."""
    replay = mr.attach(model)
    ids = random_ids(4, 64).cuda()
    batch, _ = recorded(model, replay, ids)
    layers = model.model.layers
    watched = []
    layers[0].register_forward_pre_hook(lambda *args: torch.cuda.set_sync_debug_mode("error"))
    layers[-1].register_forward_pre_hook(lambda *args: watched.append(torch.cuda.get_sync_debug_mode()))
    layers[-1].register_forward_hook(lambda *args: torch.cuda.set_sync_debug_mode("default"))
    try:
        for observe in (False, True):
            with torch.no_grad(), replay.replay(batch, observe=observe):
                model(ids)
        with torch.no_grad(), replay.record():
            model(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched == [2, 2, 2]  # "error" was in force in all three forwards, and nothing raised


def test_other_tokens_are_refused(model):
    replay = mr.attach(model)
    ids = random_ids(4, 64).cuda()
    batch, _ = recorded(model, replay, ids)
    with pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch):
        model(ids.roll(1, dims=1))


def test_compiled_with_inductor(model):
    replay = mr.attach(model)
    ids = random_ids(4, 64).cuda()
    batch, _ = recorded(model, replay, ids)
    perturb_routers(replay)
    with torch.no_grad(), replay.replay(batch):
        expected = model(ids).logits
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad(), replay.replay(batch):
        found = compiled(ids).logits
    assert (found.float() - expected.float()).abs().max() < 0.05 * expected.float().abs().max()


def test_routes_are_laid_out_on_the_device_without_a_wait():
    layers, lengths = (0, 2, 5), [40, 7, 25]
    random = np.random.default_rng(0)
    traces = [
        mr.RouteTrace(
            random.integers(0, 100, length),
            random.permuted(np.tile(np.arange(16), (length, 3, 1)), axis=2)[..., :4],
            layers,
        )
        for length in lengths
    ]
    layout = mr.TokenLayout.padded(lengths, side="left").sequence_major()
    host = mr.RouteBatch.from_traces(traces, layout, (2, 5), stand_ins=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        device = mr.RouteBatch.from_traces(traces, layout, (2, 5), stand_ins=True, device="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(device.routed_experts.cpu(), host.routed_experts)
    assert torch.equal(device.valid.cpu(), host.valid)
    assert torch.equal(device.fed_token_ids.cpu(), host.fed_token_ids)


def test_metrics_of_plug_ins_are_summed_on_the_gpu(model):
    metrics = StepMetrics(mr.attach(model).topology, torch.device("cuda"), ReplaySettings(mode="R3", check_every=0))
    sampled, mask = torch.full((2, 4), -3.0, device="cuda"), torch.ones(2, 4, dtype=torch.bool, device="cuda")
    metrics.add_samples([True, False])
    metrics.add_logprobs(sampled, sampled, mask, replayed=True)
    values = metrics.finish(is_update=True)
    assert (values["moe_replay/samples_without_routes"], values["moe_replay/k3"]) == (1, 0)
