"""The guard in the Megatron engine of the installed verl on several ranks, in every form of parallelism, on a CPU.

Virtual stages need three ranks: with two, the next rank is the one before too, and Megatron-Core confuses the shapes
that verl lets its stages tell each other.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_replay as mr

pytest.importorskip("verl", reason="runs in the environment of `make test-plugins`")
pytest.importorskip("megatron.core")

from tests.distributed.harness import RankError, run_ranks
from tests.plugins import verl_cpu, verl_megatron_cpu
from tests.plugins.verl_cpu import PROMPT, TOP_K, Rollout
from tests.plugins.verl_megatron_cpu import batch, forward, make_engine, perturbed_routers, update

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(version("verl").startswith("0.8"), reason="the guard begins with verl 0.9.0"),
]

IS_0_9_0 = version("verl").startswith("0.9.0")
GUARDS = ["check"] if IS_0_9_0 else ["check", "fix"]
DENSE_FIRST = "virtual_stages"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor_sequence_expert": {"tensor": 2, "expert": 2},
    "expert_data": {"expert": 2},
    "context": {"context": 2},
    DENSE_FIRST: {"stages": 3, "virtual": 2},  # six chunks, the first of them one dense layer
}
TESTED = [layout for layout in LAYOUTS if not (IS_0_9_0 and layout == DENSE_FIRST)]  # their routes are recorded by R2
FAULTS = {
    "zero_rows": "left rows of the capture unwritten",
    "layer_late": "one layer late from layer 2 on",
    "token_late": "one token late",
}
ONE_LAYER_A_CHUNK = {"layer_late": "no better than chance in layers"}  # a rank does not have the layer before
CONFUSIONS = {"tensor_sequence_expert": "late", "context": "late", DENSE_FIRST: "next_layer"}
CONFUSED = "verl replays routes of other tokens or layers"


def in_threes(rollout: Rollout, routed_experts: torch.Tensor | None) -> Any:
    """A batch of three micro-batches, with log-probs of the rollout."""
    from verl.utils import tensordict_utils

    data = batch(rollout, routed_experts, rollout_log_probs=torch.full(rollout.ids[:, PROMPT:].shape, -5.0))
    tensordict_utils.assign_non_tensor(data, micro_batch_size_per_gpu=2)
    return data


def ranks_of(layout: str) -> int:
    return LAYOUTS[layout].get("stages", 2)


def engine_and_rollout(layout: dict[str, Any]) -> tuple[Any, Rollout]:
    """An engine for R3, and samples of this data-parallel rank, routed by routers that disagree with the model's."""
    verl_megatron_cpu.open_megatron()
    from megatron.core import parallel_state
    from verl.workers.config.engine import EngineRouterReplayConfig

    chunks, config = verl_megatron_cpu.chunks_and_config(**layout)
    engine = make_engine(chunks, config, "R2")
    rollout = Rollout(seed=1 + parallel_state.get_data_parallel_rank())
    with perturbed_routers(torch.nn.ModuleList(chunks), 0.5):
        output = forward(engine, in_threes(rollout, None))
    rows = torch.zeros(int(rollout.mask.sum()), config.num_layers - 1, TOP_K, dtype=torch.int32)
    if output:
        rows = output["model_output"]["routed_experts"].values().int().contiguous()
    if config.pipeline_model_parallel_size > 1:
        dist.broadcast(rows, dist.get_world_size() - 1)  # as verl's driver hands them out
    rollout.routed_experts = torch.zeros(*rollout.ids.shape, config.num_layers, TOP_K, dtype=torch.int16)
    for row, part in enumerate(rows.split(rollout.mask.sum(1).tolist())):
        (places,) = rollout.mask[row].nonzero(as_tuple=True)
        rollout.routed_experts[row, places[:-1], 1:] = part[:-1].short()
    engine.engine_config.router_replay = EngineRouterReplayConfig(mode="R3")
    return engine, rollout


def updated(engine: Any, rollout: Rollout, guard: str, routed_experts: torch.Tensor) -> tuple[dict[str, float], str]:
    """Metrics of an update under a new guard, and what stopped it."""
    os.environ["MOE_REPLAY_GUARD"] = guard
    engine._guard = None
    try:
        metrics = update(engine, in_threes(rollout, routed_experts)).get("metrics", {})
        return {name: values[0] for name, values in metrics.items() if name.startswith("moe_replay/")}, ""
    except mr.MoeReplayError as error:
        return {}, str(error)
    finally:
        if engine._guard.controller is not None:
            engine._guard.controller.detach()


def on_rank(layout: dict[str, Any]) -> list[Any]:
    engine, rollout = engine_and_rollout(layout)
    return [
        [
            updated(engine, rollout, guard, rollout.routed_experts)[0],
            {fault: updated(engine, rollout, guard, getattr(verl_cpu, fault)(rollout))[1] for fault in FAULTS},
        ]
        for guard in GUARDS
    ]


def first_error(layout: dict[str, Any]) -> str:
    try:
        engine_and_rollout(layout)
    except mr.MoeReplayError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not IS_0_9_0, reason="verl 0.9.0 only")
def test_recording_that_would_wait_forever_is_refused_on_every_rank() -> None:
    errors = run_ranks(ranks_of(DENSE_FIRST), first_error, LAYOUTS[DENSE_FIRST])
    assert "would wait forever: a rank whose first layers are dense gathers no routes" in errors[0]
    assert all(errors)


@pytest.mark.parametrize("layout", TESTED)
def test_healthy_routes_pass_and_faults_stop_every_rank_by_name(layout) -> None:
    for ranks in zip(*run_ranks(ranks_of(layout), on_rank, LAYOUTS[layout]), strict=True):  # with each guard
        heard = [metrics for metrics, _ in ranks if metrics]
        assert len(heard) == (1 if layout == DENSE_FIRST else 2)
        assert heard[0] == heard[-1]  # reduced over all ranks
        assert heard[0]["moe_replay/aligned"] == 1
        assert 0.1 < heard[0]["moe_replay/agreement"] < 0.9
        assert heard[0]["moe_replay/covered"] > 0.9
        assert heard[0]["moe_replay/k3_native"] not in (0, heard[0]["moe_replay/k3_paired"])
        named = FAULTS | (ONE_LAYER_A_CHUNK if layout == DENSE_FIRST else {})
        for _, stopped in ranks:
            assert {fault: text for fault, text in stopped.items() if named[fault] not in text} == {}


def late(values: torch.Tensor, **settings: Any) -> tuple:
    """verl's packing, with routes one row late."""
    from verl.models.mcore.util import preprocess_thd_engine

    packed, *rest = preprocess_thd_engine(values, **settings)
    return (packed.roll(1, 1) if values.dim() == 4 else packed, *rest)


def on_broken_rank(layout: dict[str, Any], fault: str) -> None:
    engine, rollout = engine_and_rollout(layout)
    from verl.utils.megatron import router_replay_utils
    from verl.workers.engine.megatron import transformer_impl

    set_data = transformer_impl.set_router_replay_data

    def next_layer(routed_experts: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        rows = [torch.cat([part[:, 1:], part[:, -1:]], 1) for part in routed_experts.unbind()]
        set_data(torch.nested.as_nested_tensor(rows, layout=torch.jagged), *args, **kwargs)

    if dist.get_rank() == 1:
        if fault == "late":
            router_replay_utils.preprocess_thd_engine = late
        else:
            transformer_impl.set_router_replay_data = next_layer
    update(engine, in_threes(rollout, rollout.routed_experts))


@pytest.mark.parametrize("layout", [layout for layout in TESTED if layout in CONFUSIONS])
def test_what_verl_confuses_on_one_rank_stops_it_there(layout) -> None:
    with pytest.raises(RankError, match=rf"rank 1 ----(.|\n)*moe-replay stops this run: {CONFUSED}"):
        run_ranks(ranks_of(layout), on_broken_rank, LAYOUTS[layout], CONFUSIONS[layout])
