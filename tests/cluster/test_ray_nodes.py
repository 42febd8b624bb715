"""Ranks on the nodes of a real Ray cluster: how trajectories reach them, and which resources are free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_replay.cluster.capacity import CapacityError, Demand, Resources, check_capacity, nodes_of
from moe_replay.train.config.file import load_config
from moe_replay.train.trajectories.store import RankStore
from tests.distributed.shares import share_of
from tests.train.trajectories import LAYERS

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.whole_runs]  # runs on Ray use the store too
LIMIT_S = 300.0
MB = 10**6


class Rank:
    """A rank of the trainer, as an actor."""

    def __init__(self, number: int, size: int, rendezvous: str) -> None:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=size)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    small = {"num_cpus": 3, "num_gpus": 2, "object_store_memory": 100 * MB, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=small)
    try:
        made.add_node(num_cpus=3, object_store_memory=100 * MB)
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def start_ranks(size: int, folder: Path) -> list[Any]:
    """Actors of ranks, every second one on the second node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes()]
    made = [
        ray.remote(Rank).options(
            num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[n % 2], soft=False)
        )
        for n in range(size)
    ]
    return [one.remote(number, size, str(folder / "rendezvous")) for number, one in enumerate(made)]


@pytest.fixture(scope="module")
def ranks(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return start_ranks(4, tmp_path_factory.mktemp("ranks"))


def on_all(ranks: list[Any], function: Callable[..., Any], *args: Any) -> list[Any]:
    return ray.get([one.run.remote(function, *args) for one in ranks], timeout=LIMIT_S)


def share_in_memory() -> list[int]:
    """The bytes of `share_of`, and those that rank 0 has sent."""
    stores = []

    def opened(own: int) -> RankStore:
        stores.append(RankStore((0, 1, 2, 0)[own], LAYERS, LIMIT_S))
        return stores[0]

    received, share, _ = share_of(opened, (0, 1, 2, 0), (LAYERS,) * 4)
    return [received, share, stores[0].sent_bytes]


def test_actors_of_a_machine_map_the_trajectories_of_rank_0(ranks: list[Any]) -> None:
    for received, share, sent in on_all(ranks, share_in_memory):
        assert 0.8 * share < received <= share
        assert sent == 0


def test_the_nodes_of_the_cluster(ranks: list[Any]) -> None:
    ray.get([one.run.remote(os.getpid) for one in ranks], timeout=LIMIT_S)
    nodes = nodes_of(load_config(None, ["--cluster.launcher", "ray"]))
    assert [node.total.cpus for node in nodes] == [3, 3]
    assert [node.free.cpus for node in nodes] == [1, 1]  # two ranks on each
    assert check_capacity(nodes, Demand(2, Resources(1), 0, Resources(1))).endswith("on 2 nodes")
    with pytest.raises(CapacityError, match="Wait for the other jobs that hold these resources"):
        check_capacity(nodes, Demand(2, Resources(2), 0, Resources(1)))
