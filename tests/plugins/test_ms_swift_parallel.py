"""The guard in the Megatron GRPO trainer of the installed ms-swift on two ranks, in forms of parallelism, on a CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_replay as mr

pytest.importorskip("swift", reason="runs in the environment of `make test-plugins`")
pytest.importorskip("megatron.core")

from moe_replay.distributed.traces import merge_traces
from moe_replay.integrations.hosts import HostError
from tests.distributed.harness import RankError, run_ranks
from tests.plugins import ms_swift_cpu, verl_cpu
from tests.plugins.ms_swift_cpu import make_trainer, samples_of, scored, update
from tests.plugins.verl_cpu import TOP_K, Rollout
from tests.plugins.verl_megatron_cpu import LAYERS, perturbed_routers

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor_sequence_expert": {"tensor": 2, "expert": 2},
    "expert_data": {"expert": 2},
    "context": {"context": 2},
    "stages": {"stages": 2},
}
FAULTS = {
    "zero_rows": "left rows of the capture unwritten",
    "layer_late": "one layer late from layer 2 on",
    "token_late": "one token late",
}


def model_and_rollout(layout: dict[str, Any]) -> tuple[Any, Rollout]:
    """The part of this rank, and samples that were routed by routers that disagree with the model's."""
    ms_swift_cpu.on_cpu()
    from megatron.core import parallel_state

    model = ms_swift_cpu.model_of_six_layers(**layout)
    rollout = Rollout(seed=1 + parallel_state.get_data_parallel_rank())
    os.environ["MOE_REPLAY_GUARD"] = "fix"
    with perturbed_routers(model, 0.5):
        batches = scored(make_trainer(model, mode="R2"), samples_of(rollout, None))
    traces = [trace for batch in batches for trace in batch["grpo_batch"].moe_replay_traces]
    for group in (
        parallel_state.get_tensor_and_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        traces = merge_traces(traces, group)
    rollout.routed_experts = torch.zeros(*rollout.ids.shape, LAYERS, TOP_K, dtype=torch.int16)
    for row, trace in enumerate(traces):
        (places,) = rollout.mask[row].nonzero(as_tuple=True)
        rollout.routed_experts[row, places[:-1], 1:] = torch.from_numpy(trace.routed_experts[:-1]).short()
    return model, rollout


def updated(model: Any, rollout: Rollout, guard: str, routed_experts: torch.Tensor) -> tuple[dict[str, float], str]:
    """Metrics of an update under a new guard, and what stopped it."""
    os.environ["MOE_REPLAY_GUARD"] = guard
    trainer = make_trainer(model)
    try:
        return update(trainer, scored(trainer, samples_of(rollout, routed_experts))), ""
    except mr.MoeReplayError as error:
        return {}, str(error)


def on_rank(layout: dict[str, Any]) -> list[Any]:
    model, rollout = model_and_rollout(layout)
    return [
        [
            updated(model, rollout, guard, rollout.routed_experts)[0],
            {fault: updated(model, rollout, guard, getattr(verl_cpu, fault)(rollout))[1] for fault in FAULTS},
        ]
        for guard in ("check", "fix")
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_healthy_routes_pass_and_faults_stop_every_rank_by_name(layout) -> None:
    for ranks in zip(*run_ranks(2, on_rank, LAYOUTS[layout]), strict=True):  # with each guard
        (metrics, _), (others, _) = ranks
        assert metrics == others  # reduced over all ranks
        assert metrics["moe_replay/aligned"] == 1
        assert 0.1 < metrics["moe_replay/agreement"] < 0.9
        assert metrics["moe_replay/covered"] > 0.9
        for _, stopped in ranks:
            assert {fault: text for fault, text in stopped.items() if FAULTS[fault] not in text} == {}


def on_broken_rank(layout: dict[str, Any]) -> None:
    model, rollout = model_and_rollout(layout)
    from swift.megatron import utils

    cut = utils.get_local_topk_idx_for_current_rank
    if dist.get_rank() == 1:
        utils.get_local_topk_idx_for_current_rank = lambda *args, **kwargs: cut(*args, **kwargs).roll(1, 1)
    os.environ["MOE_REPLAY_GUARD"] = "check"
    scored(make_trainer(model), samples_of(rollout, rollout.routed_experts))


def test_what_ms_swift_confuses_on_one_rank_stops_it_there() -> None:
    named = r"rank 1 ----(.|\n)*moe-replay stops this run: ms-swift replays routes of other tokens or layers"
    with pytest.raises(RankError, match=named):
        run_ranks(2, on_broken_rank, LAYOUTS["tensor_sequence_expert"])


def on_a_rank_of_two_layers() -> str:
    """The first stage is the dense layer."""
    ms_swift_cpu.on_cpu()
    trainer = make_trainer(ms_swift_cpu.model_of_six_layers(layers=2, stages=2), mode="R2")
    try:
        scored(trainer, samples_of(Rollout(), None))
    except HostError as error:
        return str(error)
    return ""


def test_a_stage_of_dense_layers_is_refused_on_every_rank() -> None:
    named = "a pipeline stage without a router does not see ms-swift's replay"
    for text in run_ranks(2, on_a_rank_of_two_layers):
        assert named in text
        assert "dense layers only in stages [0]" in text
