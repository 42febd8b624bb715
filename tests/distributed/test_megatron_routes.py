"""Routes recorded under parallelism, kept where they were made or put together into whole traces, replay alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_replay as mr
from moe_replay.distributed.traces import collect_traces, merge_traces
from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness
from tests.distributed.megatron_models import (
    FULL,
    PRELOADED,
    Case,
    move_routers,
    sequences,
)
from tests.distributed.megatron_partition import Partition
from tests.distributed.test_megatron_layouts import ALLTOALL, reference

pytest.importorskip("megatron.core")
harness.PRELOADED.extend(PRELOADED)

CASES = {
    "dp2": Case(2, settings=FULL),
    "tp2": Case(2, tp=2, settings=FULL),
    "pp2-stage-without-routers": Case(2, pp=2, settings=FULL | {"num_layers_in_first_pipeline_stage": 1}),
    "cp2-packed": Case(2, cp=2, packed=True, settings=FULL),
    "tp2-pp2-vpp2": Case(4, tp=2, pp=2, vpp=2, settings=FULL),
    "tp2-cp2": Case(4, tp=2, cp=2, settings=FULL),
    "tp2-cp2-pp2": Case(8, tp=2, cp=2, pp=2, settings=FULL),
    "dp2-ep2-pp2-vpp2": Case(4, pp=2, vpp=2, ep=2, settings=FULL | ALLTOALL),
}


class Recorder(Partition):
    """Records every forward, or replays what was recorded on this rank."""

    def __init__(self, case: Case, loaded: dict[str, Any]) -> None:
        super().__init__(case, loaded)
        self.batches: dict[tuple[int, tuple[int, ...]], mr.RouteBatch] = {}
        self.shards: dict[int, list[list[mr.RouteTrace]]] = {number: [] for number in self.numbers()}
        self.recording = True

    def forward_step(self, numbers: Iterator[int], model: nn.Module) -> tuple[Tensor, Any]:
        number, layers = next(numbers), self.replay.layers_of(model)
        layout, inputs = self.inputs(number)
        if self.recording:
            with self.replay.record() as recording:
                output = model(**inputs)
            self.batches[number, layers] = recording.batch()
            self.shards[number].append(recording.traces(layout, sequences(number, self.case.varying)))
        else:
            with self.replay.replay(self.batches[number, layers]):
                output = model(**inputs)
        return output, lambda losses: self.loss(losses, inputs["loss_mask"], layout.num_tokens)


def gradients_of(partition: Partition) -> dict[str, Tensor]:
    return {name: parameter.main_grad.float().clone() for name, parameter in partition.parameters}


def record_and_replay(case: Case, path: str) -> dict[str, Any]:
    """On each rank: traces gathered from all, and how far replays of the two kinds are from each other."""
    from megatron.core import parallel_state as ps

    loaded = torch.load(path, weights_only=True)
    kept = Recorder(case, loaded)
    kept.run(forward_only=True)
    traces = []
    for number in kept.numbers():
        whole = [
            mr.RouteTrace.merge(shards) for shards in zip(*kept.shards[number], strict=True)
        ]  # chunks of this rank
        for group in (ps.get_tensor_and_context_parallel_group(), ps.get_pipeline_model_parallel_group()):
            whole = merge_traces(whole, group)
        traces.append(whole)
    everywhere = [collect_traces(of_batch, ps.get_data_parallel_group()) for of_batch in traces]

    move_routers_everywhere(kept)
    kept.recording = False
    losses, gradients = kept.run(), gradients_of(kept)

    by_number = dict(zip(kept.numbers(), [[t.to_bytes() for t in of_batch] for of_batch in traces], strict=True))
    gathered = Partition(case, loaded | {"traces": by_number})
    move_routers_everywhere(gathered)
    same_rows = []
    for number in gathered.numbers():
        layout, _ = gathered.inputs(number)
        for model in gathered.models:
            layers = gathered.replay.layers_of(model)
            batch = mr.RouteBatch.from_traces(traces[number % case.micro_batches], layout, layers)
            if not layers:
                continue
            same_rows.append(
                torch.equal(batch.routed_experts[batch.valid], kept.batches[number, layers].routed_experts[batch.valid])
            )
            assert batch.valid.sum() == len(layers) * (layout.num_rows - layout.num_padding)
    losses_gathered, gradients_gathered = gathered.run(), gradients_of(gathered)
    apart = [(gradients[name] - gradients_gathered[name]).norm() / gradients[name].norm() for name in gradients]
    return {
        "same rows": all(same_rows),
        "losses": losses,
        "losses gathered": losses_gathered,
        "apart": max(apart).item(),
        "traces": [[trace.to_bytes() for trace in of_batch] for of_batch in everywhere],
    }


def move_routers_everywhere(partition: Partition) -> None:
    for chunk in partition.chunks:
        move_routers(chunk, seed=900)


@pytest.mark.parametrize(
    "name", with_whole_runs(with_thorough(CASES, {"dp2", "tp2", "tp2-cp2-pp2"}), {"tp2-cp2", "dp2-ep2-pp2-vpp2"})
)
def test_kept_and_gathered_routes_replay_alike(name: str) -> None:
    case = CASES[name]
    path, _ = reference()
    ranks = harness.run_ranks(case.size, record_and_replay, case, path)
    for rank in ranks:
        assert rank["same rows"]
        assert rank["losses"] == pytest.approx(rank["losses gathered"], abs=2e-6)
        assert rank["apart"] < 2e-6
        assert rank["traces"] == ranks[0]["traces"]
    # The whole model, run alone, takes the same routes with these weights.
    moved = torch.load(path, weights_only=True)["moved traces"]
    expected = [
        [trace for dp in range(case.dp) for trace in moved[dp * case.micro_batches + i]]
        for i in range(case.micro_batches)
    ]
    assert ranks[0]["traces"] == expected


def counts_differ() -> str:
    import torch.distributed as dist

    trace = mr.RouteTrace([1, 2], [[[0, 1]], [[2, 3]]], [1], num_experts=4)
    with pytest.raises(mr.AlignmentError, match=r"found \[0, 1\]") as caught:
        merge_traces([trace] * dist.get_rank())
    assert collect_traces([trace] * dist.get_rank()) == [trace]
    return str(caught.value)


def test_ranks_of_different_micro_batches_cannot_be_merged() -> None:
    for message in harness.run_ranks(2, counts_differ):
        assert "use collect_traces" in message
