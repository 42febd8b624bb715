"""Ray's object store as the store of trajectories, and what is free, on a real cluster of two nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from moe_replay.cluster.capacity import CapacityError, Demand, Resources, check_capacity, nodes_of
from moe_replay.distributed.collectives import broadcast_bytes, open_control_group
from moe_replay.distributed.ranks import barrier, rank
from moe_replay.train.config.file import load_config
from moe_replay.train.rollout import step_rollout
from moe_replay.train.trajectories.ray_store import OBJECT_BYTES, RayStore, ranks_share_ray
from moe_replay.train.trajectories.store import StoreError
from moe_replay.train.trajectories.wire import batch_from_bytes, batch_to_bytes
from tests.distributed.shares import COUNT, HALVES, share_of, trajectories
from tests.train.trajectories import LAYERS, random_trajectory

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.whole_runs]  # runs on Ray use the store too
LIMIT_S = 300.0
MB = 10**6


class Rank:
    """A rank of the trainer, as an actor."""

    def __init__(self, number: int, size: int, rendezvous: str) -> None:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=size)
        self.kept: Any = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def open_and_get(self, numbers: Sequence[int]) -> bytes:
        """Keep a store, references of its batch, and one trajectory of it; return the reference of the batch."""
        with open_control_group():
            store = RayStore(LAYERS, LIMIT_S, object_bytes=1)
            sent = broadcast_bytes(batch_to_bytes(store.put(trajectories())) if rank() == 0 else None)
            batch = batch_from_bytes(sent)
            parts = ray.get(store._keeper.take.remote(batch.number, 0, list(numbers)))
            self.kept = store, parts, store.get(batch, [0], LAYERS)[0]
            barrier()
        return sent

    def errors_of(self, sent: bytes) -> list[str]:
        """What getting says once rank 0 is gone: by the reference of the batch, and by those of Ray."""
        store, parts, seen = self.kept
        assert seen.trace == trajectories()[0].trace  # what was returned stays usable
        said = []
        for call in (lambda: store.get(batch_from_bytes(sent), [1], LAYERS), lambda: store._read(parts, [2])):
            try:
                call()
                said.append("")
            except StoreError as error:
                said.append(str(error))
        return said


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


# ---- what all stores do ----------------------------------------------------------------------------------------------


def share_in_ray(data_ranks: Sequence[int], layers: Sequence[Sequence[int]], object_bytes: int) -> list[int]:
    return share_of(lambda own: RayStore(tuple(layers[own]), LIMIT_S, object_bytes), data_ranks, layers)


@pytest.mark.parametrize(
    ("data_ranks", "layers", "object_bytes"),
    [
        ((0, 1, 2, 0), (LAYERS,) * 4, 3000),  # some sequences share an object, the longest have one each
        ((0, 0, 1, 1), (*HALVES, *HALVES), OBJECT_BYTES),
        ((0, 0, 0, 1), (LAYERS, LAYERS, (), LAYERS), 1),  # a stage without routers
    ],
)
def test_a_rank_receives_its_own_share(
    ranks: list[Any], data_ranks: tuple[int, ...], layers: tuple[tuple[int, ...], ...], object_bytes: int
) -> None:
    for received, share, _ in on_all(ranks, share_in_ray, data_ranks, layers, object_bytes):
        assert 0.8 * share < received <= share


def parts_of_a_batch(object_bytes: int) -> list[int]:
    """The first sequence of each object that rank 0 puts; on the others, nothing."""
    with open_control_group():
        store = RayStore(LAYERS, LIMIT_S, object_bytes)
        if rank() == 0:
            store.put(trajectories())
        starts = [part.start for section in store._sections for part in section]
        store.close()
    return starts


def test_short_sequences_share_an_object(ranks: list[Any]) -> None:
    """Each object costs Ray milliseconds, however small it is."""
    (all_in_one, *_), (some, *_), (alone, *_) = (
        on_all(ranks, parts_of_a_batch, size) for size in (OBJECT_BYTES, 3000, 1)
    )
    assert all_in_one == [0]
    assert alone == list(range(COUNT))
    assert 1 < len(some) < COUNT
    assert some[0] == 0
    assert some[1] > 1


def test_the_nodes_of_the_cluster(ranks: list[Any]) -> None:
    ray.get([one.run.remote(os.getpid) for one in ranks], timeout=LIMIT_S)
    nodes = nodes_of(load_config(None, ["--cluster.launcher", "ray"]))
    assert [node.total.cpus for node in nodes] == [3, 3]
    assert [node.free.cpus for node in nodes] == [1, 1]  # two ranks on each
    assert check_capacity(nodes, Demand(2, Resources(1), 0, Resources(1))).endswith("on 2 nodes")
    with pytest.raises(CapacityError, match="Wait for the other jobs that hold these resources"):
        check_capacity(nodes, Demand(2, Resources(2), 0, Resources(1)))


# ---- Ray's own -------------------------------------------------------------------------------------------------------


def chosen_store() -> tuple[str, bool]:
    with open_control_group():
        with mock.patch.object(step_rollout, "layers_of", return_value=LAYERS):
            store: Any = step_rollout.open_store(mock.Mock(), LIMIT_S)
        store.close()
        return type(store).__name__, ranks_share_ray()


def test_ranks_of_a_ray_job_choose_rays_store(ranks: list[Any]) -> None:
    assert on_all(ranks, chosen_store) == [("RayStore", True)] * 4


def test_a_process_outside_of_ray_does_not() -> None:
    assert not ranks_share_ray()


def used_memory_below(limit: float) -> bool:
    """Wait until objects take less of the stores of all nodes."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"] < limit:
            return True
        time.sleep(0.2)
    return False


def put_large(batches: int, tokens: int) -> tuple[int, bool]:
    """Put and get batches, one after the other; the bytes of one, and whether only the last is kept then."""
    with open_control_group():
        store = RayStore(LAYERS, LIMIT_S)
        for number in range(batches):
            made = [random_trajectory(number, prompt=3, completion=tokens)]
            batch = batch_from_bytes(broadcast_bytes(batch_to_bytes(store.put(made)) if rank() == 0 else None))
            before = store.received_bytes
            (found,) = store.get(batch, [0], LAYERS)
            assert not found.trace.routed_experts.flags.owndata
            assert not found.logprobs.flags.writeable
            size = store.received_bytes - before
            del found
            barrier()
        is_freed = rank() != 0 or used_memory_below(2.5 * size)  # a copy on each of two nodes
        barrier()
        store.close()
    return size, is_freed


def test_objects_are_freed_with_the_next_batch(ranks: list[Any]) -> None:
    results = on_all(ranks, put_large, 6, 500_000)
    assert all(is_freed for _, is_freed in results)
    assert min(size for size, _ in results) > 6 * MB
    assert used_memory_below(MB)


def test_what_is_lost_is_an_error_that_says_why(ranks: list[Any]) -> None:
    """The last one: without the first rank, the others are of no use."""
    first, second, *_ = ranks
    ref, *_ = ray.get([one.open_and_get.remote([1, 2]) for one in ranks], timeout=LIMIT_S)
    ray.kill(first)
    gone, owner = ray.get(second.errors_of.remote(ref), timeout=LIMIT_S)
    # The actor that keeps the references ends with the first rank, but perhaps later: then the objects have no owner.
    find, fetch = "find its trajectories in Ray's object store: the actor that keeps the", "fetch its trajectories"
    assert gone.startswith((f"rank 1 could not {find}", f"rank 1 could not {fetch}"))
    assert "rank 0" in gone
    assert "rank 1 could not fetch its trajectories in Ray's object store: rank 0, which owns them, has ended" in owner
    assert "Resume the run from its last checkpoint" in owner
