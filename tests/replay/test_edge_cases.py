"""The smallest and the largest models: one expert, one layer, one more expert than a byte can name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moe_replay as mr
from tests.models import assert_same_gradients, gradients, loss, random_ids, tiny_qwen3_moe
from tests.replay.adapters.families import RELEASE, tiny_model


def test_one_expert():
    model, ids = tiny_qwen3_moe(num_experts=1, num_experts_per_tok=1), random_ids(2, 9)
    native = loss(model(ids))
    native.backward()
    expected = gradients(model)
    replay = mr.attach(model)
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    layout = mr.TokenLayout.padded([9, 9])
    traces = [mr.RouteTrace.from_bytes(trace.to_bytes()) for trace in recording.traces(layout, ids.tolist())]
    assert all(trace.num_experts == 1 and not trace.routed_experts.any() for trace in traces)
    with replay.replay(mr.RouteBatch.from_traces(traces, layout), observe=True) as replaying:
        again = loss(model(ids))
    again.backward()
    assert torch.equal(again, native)
    assert_same_gradients(gradients(model), expected)
    assert not replaying.native().routed_experts.any()


@pytest.mark.skipif(RELEASE < 5, reason="not in Transformers 4")
def test_one_layer_beside_a_list_of_one_rotary_embedding():
    model, ids = tiny_model("granitemoe_swa", num_hidden_layers=1).eval(), random_ids(2, 6, vocabulary=32)
    replay = mr.attach(model)
    assert [site.name for site in replay.sites.values()] == ["model.layers.0.block_sparse_moe.router"]
    with torch.no_grad(), replay.record() as recording:
        native = model(input_ids=ids)[0]
    with torch.no_grad(), replay.replay(recording.batch()):
        assert torch.equal(model(input_ids=ids)[0], native)


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_the_last_expert_keeps_its_id(num_experts, dtype):
    """Replayed, recorded, and recorded again from what was replayed."""
    model = tiny_qwen3_moe(num_experts=num_experts, num_hidden_layers=2, moe_intermediate_size=4)
    replay, ids, last = mr.attach(model), random_ids(2, 9), num_experts - 1
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[last].mul_(50)
    with torch.no_grad(), replay.record() as recording:
        model(ids)
    batch = recording.batch()
    assert batch.routed_experts.dtype == dtype
    assert int(batch.routed_experts.max()) == last
    observed = dataclasses.replace(
        batch, routed_experts=batch.routed_experts.flip(1), valid=batch.valid.clone(), all_valid=(False,)
    )
    with torch.no_grad(), replay.replay(observed, observe=True) as replaying:
        model(ids)
    assert torch.equal(replaying.native().routed_experts, batch.routed_experts)
    traces = batch.to_traces(ids.tolist(), mr.TokenLayout.padded([9, 9]))
    assert max(trace.routed_experts.max() for trace in traces) == last
