"""Pipeline chunks, stages and shards: what a rank must say about its routes, and what it is not let get away with."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_replay as mr
from tests.distributed import harness
from tests.distributed.megatron_models import (
    FULL,
    LENGTHS,
    PRELOADED,
    WIDTH,
    Case,
    sequences,
)
from tests.distributed.megatron_partition import Partition
from tests.distributed.test_megatron_layouts import reference

pytest.importorskip("megatron.core")
harness.PRELOADED.extend(PRELOADED)


def partition_of(case: Case, path: str) -> Partition:
    return Partition(case, torch.load(path, weights_only=True))


def on_ranks(case: Case, function: Any) -> list[Any]:
    path, _ = reference()
    return harness.run_ranks(case.size, function, case, path)


def received(partition: Partition) -> Tensor:
    """Something like what the stage before this one sends."""
    columns = WIDTH // partition.case.cp // partition.case.tp
    return torch.randn(columns, len(LENGTHS), partition.config.hidden_size, requires_grad=True)


# ---- what the caller says -------------------------------------------------------------------------------------------


def stages_without_ids(case: Case, path: str) -> bool:
    from megatron.core import parallel_state

    partition = partition_of(case, path)
    if parallel_state.is_pipeline_first_stage():
        return False
    layout, inputs = partition.inputs(0)
    batch = mr.RouteBatch.from_traces(partition.traces(0), layout, partition.replay.layers)
    model, ids = partition.models[0], inputs["input_ids"]
    partition.chunks[0].set_input_tensor(received(partition))
    inputs["input_ids"] = None
    with pytest.raises(mr.AlignmentError, match="not fed token ids"), partition.replay.replay(batch):
        model(**inputs)
    with partition.replay.replay(batch, fed_ids=ids):
        model(**inputs)
    with pytest.raises(mr.AlignmentError, match="another token"), partition.replay.replay(batch, fed_ids=ids.roll(1)):
        model(**inputs)
    with partition.replay.record(fed_ids=ids) as recording:
        model(**inputs)
    assert torch.equal(recording.batch().fed_token_ids, ids.int())
    return True


def test_a_stage_that_is_fed_no_ids_is_told_them() -> None:
    assert on_ranks(Case(2, pp=2), stages_without_ids) == [False, True]


def batches_of_other_layers(case: Case, path: str) -> list[int]:
    partition = partition_of(case, path)
    layout, inputs = partition.inputs(0)
    replay = partition.replay
    others = [layer for layer in replay.topology.layers if layer not in replay.layers]
    batch = mr.RouteBatch.from_traces(partition.traces(0), layout, others)
    with pytest.raises(mr.AlignmentError, match="no routes for a layer of the model"), replay.replay(batch):
        partition.models[0](**inputs)
    return list(replay.layers)


def test_routes_of_another_stage_are_refused() -> None:
    assert on_ranks(Case(2, pp=2), batches_of_other_layers) == [[1, 2], [4, 5, 7]]


def chunks_with_the_routes_of_others(case: Case, path: str) -> list[list[int]]:
    partition = partition_of(case, path)
    replay, models = partition.replay, partition.models
    layout, inputs = partition.inputs(0)
    layers = [replay.layers_of(model) for model in models]
    for chunk in partition.chunks:
        chunk.set_input_tensor(received(partition))
    of_first = mr.RouteBatch.from_traces(partition.traces(0), layout, layers[0])
    with (
        pytest.raises(mr.AlignmentError, match=r"a pipeline chunk runs that this replay has no routes for"),
        replay.replay(of_first),
    ):
        models[1](**inputs)
    whole = mr.RouteBatch.from_traces(partition.traces(0), layout, replay.layers)
    with replay.replay(whole):  # the routes of both chunks serve either, and both
        models[1](**inputs)
    with replay.replay(whole):
        models[0](**inputs)
        models[1](**inputs)
    with pytest.raises(mr.errors.ReplayStateError, match="twice"), replay.replay(whole):
        models[0](**inputs)
        models[0](**inputs)
    with pytest.raises(mr.errors.ReplayStateError, match="did not run inside this replay"), replay.replay(of_first):
        pass
    if len(layers[1]) > 1:
        part = mr.RouteBatch.from_traces(partition.traces(0), layout, layers[1][:1])
        with pytest.raises(mr.AlignmentError, match="no routes for a layer of the model"), replay.replay(part):
            models[1](**inputs)
    with replay.record() as recording:
        models[1](**inputs)
    assert recording.batch().layers == layers[1]
    with pytest.raises(mr.errors.ReplayStateError, match="not attached to"):
        replay.layers_of(nn.Linear(1, 1))
    return [list(of_chunk) for of_chunk in layers]


def test_each_chunk_takes_its_own_routes() -> None:
    found = on_ranks(Case(2, pp=2, vpp=2), chunks_with_the_routes_of_others)
    assert found == [[[1], [4, 5]], [[2], [7]]]


def stage_without_routers(case: Case, path: str) -> list[int]:
    partition = partition_of(case, path)
    replay, model = partition.replay, partition.models[0]
    layout, inputs = partition.inputs(0)
    if replay.layers:
        return list(replay.layers)
    batch = mr.RouteBatch.from_traces(partition.traces(0), layout, replay.layers)
    assert batch.routed_experts.shape == (0, layout.num_rows, 2)
    with replay.replay(batch):
        model(**inputs)
    with pytest.raises(mr.errors.ReplayStateError, match="no model ran inside this replay"), replay.replay(batch):
        pass
    with pytest.raises(mr.AlignmentError, match="another token"), replay.replay(batch):
        model(**(inputs | {"input_ids": inputs["input_ids"] + 1}))
    with replay.record() as recording:
        model(**inputs)
    assert recording.batch().layers == ()
    traces = recording.traces(layout, sequences(0))
    assert [trace.layers for trace in traces] == [replay.topology.layers] * len(LENGTHS)
    assert not any(trace.valid.any() for trace in traces)
    return []


def test_a_stage_without_routers_works_by_the_same_code() -> None:
    case = Case(2, pp=2, settings={"num_layers_in_first_pipeline_stage": 1})
    assert on_ranks(case, stage_without_routers) == [[], [1, 2, 4, 5, 7]]


# ---- layouts that are not this rank's -------------------------------------------------------------------------------


def wrong_shards(case: Case, path: str) -> None:
    """Shapes fit in every case; only the tokens are others."""
    from megatron.core import parallel_state as ps

    partition = partition_of(case, path)
    _, inputs = partition.inputs(0)
    padded = mr.TokenLayout.padded([len(ids) for ids in sequences(0)], WIDTH)
    tp_rank, cp_rank = ps.get_tensor_model_parallel_rank(), ps.get_context_parallel_rank()
    right = padded.context_parallel(cp_rank, 2).sequence_parallel(tp_rank, 2).sequence_major()
    wrong = {
        "another token than the routes": [
            padded.context_parallel(1 - cp_rank, 2).sequence_parallel(tp_rank, 2).sequence_major(),
            padded.context_parallel(cp_rank, 2, "contiguous").sequence_parallel(tp_rank, 2).sequence_major(),
        ],
        "another part of the columns": [
            padded.context_parallel(cp_rank, 2).sequence_parallel(1 - tp_rank, 2).sequence_major()
        ],
        "expected sequence-major": [padded.context_parallel(cp_rank, 2).sequence_parallel(tp_rank, 2)],
    }
    for text, layouts in wrong.items():
        for layout in layouts:
            assert layout.num_rows == right.num_rows
            batch = mr.RouteBatch.from_traces(partition.traces(0), layout)
            with pytest.raises(mr.AlignmentError, match=text), partition.replay.replay(batch):
                partition.models[0](**inputs)
    with partition.replay.replay(mr.RouteBatch.from_traces(partition.traces(0), right)):
        partition.models[0](**inputs)


def test_the_shard_of_another_rank_is_refused() -> None:
    assert on_ranks(Case(4, tp=2, cp=2), wrong_shards) == [None] * 4


# ---- steps ----------------------------------------------------------------------------------------------------------


class Watched(Partition):
    """Keeps weak references to the routes of every forward."""

    def run(self, forward_only: bool = False) -> list[float]:
        self.passes: list[weakref.ref] = getattr(self, "passes", [])
        opened = self.replay._active.open

        def watched(forward_pass: Any, **settings: Any) -> None:
            self.passes.append(weakref.ref(forward_pass))
            opened(forward_pass, **settings)

        self.replay._active.open = watched
        losses = super().run(forward_only)
        del self.replay._active.open
        return losses


def steps_with_evaluations(case: Case, path: str) -> list[float]:
    partition = Watched(case, torch.load(path, weights_only=True))
    distances = []
    for _ in range(2):
        partition.run(forward_only=True)  # old log-probs
        partition.run()
        distances.append(partition.distance()[0])
        partition.run(forward_only=True)  # an evaluation
    gc.collect()
    assert len(partition.passes) == 6 * case.micro_batches * len(partition.models)
    assert [forward_pass() for forward_pass in partition.passes if forward_pass() is not None] == []
    assert partition.replay._active._backwards == {}
    return distances


@pytest.mark.parametrize(
    "case", [Case(2, pp=2, settings=FULL), Case(2, pp=2, vpp=2, settings=FULL)], ids=["pp2", "vpp2"]
)
def test_passes_without_gradient_between_steps_change_nothing_and_nothing_is_left(case: Case) -> None:
    for distances in on_ranks(case, steps_with_evaluations):
        assert max(distances) < 2e-6


class Native(Partition):
    """Routes by itself."""

    def forward_step(self, numbers: Iterator[int], model: nn.Module) -> tuple[Tensor, Any]:
        layout, inputs = self.inputs(next(numbers))
        return model(**inputs), lambda losses: self.loss(losses, inputs["loss_mask"], layout.num_tokens)


class ForwardOnly(Partition):
    """Replays in forwards, and leaves recomputation to the routers."""

    def run(self, forward_only: bool = False) -> list[float]:
        active = self.replay._active
        active.enter_backward = lambda forward_pass, **_: type(active).enter_backward(active, None)
        return super().run(forward_only)


def distances_without_replay(case: Case, path: str) -> list[float]:
    loaded = torch.load(path, weights_only=True)
    found = []
    for kind in (Native, ForwardOnly):
        partition = kind(case, loaded)
        partition.run()
        found.append(partition.distance()[0])
    return found


def test_the_layout_tests_would_notice() -> None:
    """Native routing, and replay that is lost in recomputation, are far beyond the tolerance of the layout tests."""
    for native, forward_only in on_ranks(Case(2, pp=2, settings=FULL), distances_without_replay):
        assert native > 1e-2
        assert forward_only > 1e-2


def batched_interleaving(case: Case, path: str) -> str:
    with pytest.raises(mr.errors.UnsupportedRouterError, match="batch_p2p_comm") as caught:
        partition_of(case, path)
    return str(caught.value)


def test_two_interleaved_stages_with_batched_messages_are_refused() -> None:
    settings = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    for message in on_ranks(Case(2, pp=2, vpp=2, settings=settings), batched_interleaving):
        assert "overlap_p2p_comm=True" in message
