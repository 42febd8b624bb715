"""Resources of a run, the environment of its ranks, its state actor and its engines; without a cluster."""

from __future__ import annotations

import math
from typing import Any

import pytest

from moe_replay.cluster.driver import ClusterError, _status
from moe_replay.cluster.engines import EngineGroup, EnginePlacement
from moe_replay.cluster.layout import RankPlacement, engine_devices, is_possible, plan_resources, rank_environments
from moe_replay.cluster.ranks import Lost, Outcome
from moe_replay.cluster.state_actor import EngineList, EngineRequest, RunState
from moe_replay.errors import ExitStatus, LayoutError
from moe_replay.train.config.train_config import TrainConfig

GPUS = {"CPU": 64.0, "GPU": 16.0}
MEGATRON = {"kind": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4}


def config(backend: dict[str, Any] | None = None, **cluster: Any) -> TrainConfig:
    rollout = {"options": {"tensor_parallel_size": 4}}
    tables = {"cluster": {"launcher": "ray", **cluster}, "rollout": rollout, "backend": backend or {}}
    return TrainConfig.model_validate(tables)


def placements(*devices: str) -> list[RankPlacement]:
    """Two ranks per node."""
    return [RankPlacement(f"node {n // 2}", f"10.0.0.{n // 2}", (one,), 5000 + n) for n, one in enumerate(devices)]


def test_separate_engines_have_resources_of_their_own() -> None:
    layout = plan_resources(config(trainer_nodes=2, ranks_per_node=8, engines=3, cpus_per_rank=2), GPUS)
    assert (layout.nodes, layout.trainer, layout.rank) == (2, {"CPU": 16, "GPU": 8}, {"CPU": 2, "GPU": 1})
    assert (layout.engines, layout.engine, layout.cpus) == (3, {"CPU": 1, "GPU": 4}, 35)


def test_colocated_engines_are_in_the_bundles_of_the_ranks() -> None:
    asked = config(trainer_nodes=2, ranks_per_node=8, engines=4, placement="colocated", cpus_per_engine=3)
    layout = plan_resources(asked, GPUS)
    assert (layout.trainer, layout.engine) == ({"CPU": 14, "GPU": 8}, {"CPU": 3})
    fewer = plan_resources(asked, GPUS, nodes=1)
    assert (fewer.nodes, fewer.engines, fewer.trainer) == (1, 2, layout.trainer)


def test_engines_that_need_more_devices_than_their_machine_has_ranks_are_refused() -> None:
    asked = config(trainer_nodes=2, ranks_per_node=8, engines=6, placement="colocated")
    with pytest.raises(LayoutError, match=r"cluster.ranks_per_node = 8, found 3 x 4"):
        plan_resources(asked, GPUS)
    assert plan_resources(asked, {"CPU": 64.0}).accelerator is None  # on CPUs they share nothing


def test_a_replica_has_devices_of_its_own() -> None:
    asked = config(trainer_nodes=1, ranks_per_node=8, engines=1)
    options = {"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": True}
    asked = asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"options": options})})
    assert plan_resources(asked, GPUS).engine == {"CPU": 1, "GPU": 8}


@pytest.mark.parametrize(
    ("device", "resources", "found"),
    [
        ("cpu", GPUS, None),
        ("auto", GPUS, "GPU"),
        ("auto", {"CPU": 8.0}, None),
        ("cuda", {}, "GPU"),
        ("auto", {"NPU": 8.0}, "NPU"),
    ],
)
def test_what_ranks_compute_on(device: str, resources: dict[str, float], found: str | None) -> None:
    assert plan_resources(config({"device": device}), resources).accelerator == found


def test_ranks_get_the_environment_of_torchrun() -> None:
    layout = plan_resources(config(trainer_nodes=2, ranks_per_node=2), GPUS)
    variables = rank_environments(placements("3", "1", "0", "2"), layout, restarts=1)
    shown = [{name: one[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")} for one in variables]
    assert shown == [
        {"RANK": str(2 * node + local), "LOCAL_RANK": str(local), "GROUP_RANK": str(node)}
        for node in (0, 1)
        for local in (0, 1)
    ]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in variables] == ["3,1", "3,1", "0,2", "0,2"]
    same = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.0", "MASTER_PORT": "5000"}
    assert all(one.items() >= (same | {"TORCHELASTIC_RESTART_COUNT": "1"}).items() for one in variables)


def test_colocated_engines_see_the_devices_of_their_ranks() -> None:
    asked = config(trainer_nodes=2, ranks_per_node=2, engines=4, placement="colocated")
    asked = asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"options": {}})})
    layout = plan_resources(asked, GPUS)
    found = [engine_devices(asked, placements("3", "1", "0", "2"), layout, number) for number in range(4)]
    assert found == [{"CUDA_VISIBLE_DEVICES": one} for one in ("3", "1", "0", "2")]


def test_layouts_that_fewer_machines_can_hold() -> None:
    assert [is_possible(config(ranks_per_node=3), nodes) for nodes in (0, 1, 2)] == [False, True, True]
    asked = config(MEGATRON, ranks_per_node=8)  # 2 x 2 ranks hold the dense layers, 2 x 4 x 2 all experts
    assert [is_possible(asked, nodes) for nodes in (1, 2, 3, 4)] == [False, True, False, True]


def test_driver_rank_0_and_commands_exchange_state_through_the_actor() -> None:
    state = RunState(engines=2, token="secret")
    assert state.view() == (None, 2, 0, b"")
    request = EngineRequest("vllm", {"model": "m"})
    assert state.request_engines(request) == "secret"
    assert state.push_output(b"step 1\n") == state.push_output(b"step 2\n") == 0
    assert state.scale(3) == 2
    assert state.view() == (request, 3, 1, b"step 1\nstep 2\n")
    assert state.view().output == b""
    state.interrupt()
    assert state.push_output(b"") == 1
    state.set_engines(EngineList(("http://a",), 1))
    assert state.engines().urls == ("http://a",)


# ---- engines ---------------------------------------------------------------------------------------------------------


def engine_group(**cluster: Any) -> tuple[EngineGroup, list[str]]:
    """A group whose engines count as ready, though none was started; and its log lines."""
    layout, lines = plan_resources(config(**cluster), GPUS), []
    group = EngineGroup(
        layout,
        1,
        ("token", "folder", {}),
        "{}.log".format,
        lambda index: EnginePlacement(f"bundles of {index}", 0, {}),
        lines.append,
    )
    group.reserve(layout.engines)
    for slot in group._slots:
        slot.url = f"http://engine-{slot.index}"
    group._was_ready = True
    return group, lines


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Placement groups that were removed."""
    groups: list[Any] = []
    monkeypatch.setattr(pytest.importorskip("ray").util, "remove_placement_group", groups.append)
    return groups


def test_engines_are_started_again_until_they_are_given_up(freed: list[Any]) -> None:
    group, lines = engine_group(engines=2)
    first, second = group._slots
    for slot in (first, second, first, second):
        group._ended(slot, "exited with status -9")
    assert lines[:2] == [f"engine {n} exited with status -9; restarting (1 of 1)" for n in (0, 1)]
    assert lines[2] == "engine 0 exited with status -9; giving up after 1 restarts; log: 0.log"
    assert group.error == "no engine left; engine 1 exited with status -9; log: 1.log"
    assert not group.lost
    assert freed == ["bundles of 0", "bundles of 1"]


def test_an_engine_that_was_given_up_is_not_replaced_until_the_run_is_scaled(freed: list[Any]) -> None:
    group, lines = engine_group(engines=2)
    for _ in range(2):
        group._ended(group._slots[0], "exited with status -9")
    group._slots[0].not_before = math.inf  # nothing is started here
    group.reconcile(EngineRequest("vllm", {}), 2)
    assert [slot.index for slot in group._slots] == [1]
    assert group.reserve(2) == ["bundles of 1"], "the trainer starts again with the engines that are left"
    started: list[int] = []
    group._start = lambda slot: started.append(slot.index)  # type: ignore[method-assign]
    group.reconcile(EngineRequest("vllm", {}), 3, scalings=1)
    assert started == [2, 3]
    assert lines[-2:] == ["engine 2 joins: 2 of 3 engines", "engine 3 joins: 3 of 3 engines"]
    for _ in range(2):
        group._ended(group._slots[0], "exited with status -9")
    group.reconcile(EngineRequest("vllm", {}), 3, scalings=2)  # to the same number, after a repair
    assert [slot.index for slot in group._slots] == [2, 3, 4]


def test_lost_ranks_are_no_success() -> None:
    """Not even where nothing is started again, since engines have failed."""
    with pytest.raises(ClusterError, match=r"rank 0 was lost \(killed\); not restarting the trainer: found no engine"):
        _status({0: Lost("killed"), 1: Outcome(ExitStatus.OK)}, "no engine left")
    with pytest.raises(ClusterError, match=r"^rank 0: no engine left$"):
        _status({0: Outcome(ExitStatus.FAILED, "no engine left", is_engine_error=True), 1: Lost("killed")}, "no engine")


def test_colocated_engines_are_not_restarted_alone() -> None:
    """The trainer now holds the devices' memory: ranks and engines all restart."""
    group, lines = engine_group(trainer_nodes=2, ranks_per_node=4, engines=2, placement="colocated")
    group._ended(group._slots[1], "exited with status -9")
    assert group.lost == "colocated engine 1 exited with status -9"
    group.reconcile(EngineRequest("vllm", {}), 2)
    assert [slot.actor for slot in group._slots] == [None, None]
    assert not lines
    assert not group.error
    group.reset()
    assert not group.lost
    assert group.engines == EngineList()
