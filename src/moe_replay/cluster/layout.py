"""What a run asks of a cluster: bundles of resources for ranks and engines, and the environment of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_replay.errors import LayoutError
from moe_replay.rollout.engine import devices_per_engine
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.visible_devices import VISIBLE_DEVICES

ACCELERATORS = {"cuda": "GPU", "npu": "NPU"}
"""Ray's names of what the types of devices of torch are counted as."""
VISIBLE = {name: VISIBLE_DEVICES[kind] for kind, name in ACCELERATORS.items()}


class Layout(NamedTuple):
    """Resources of a run, by Ray's names.

    trainer       of each machine of the trainer; with colocated engines, theirs too
    engine        of each engine that has its own
    rank          of one rank
    nodes         machines of the trainer
    accelerator   resource that ranks and engines compute on; None: on CPUs
    """

    trainer: dict[str, float]
    engine: dict[str, float]
    rank: dict[str, float]
    nodes: int
    ranks_per_node: int
    engines: int
    colocated: bool
    accelerator: str | None

    @property
    def cpus(self) -> float:
        """CPU cores of the whole run."""
        engines = 0 if self.colocated else self.engines * self.engine["CPU"]
        return self.nodes * self.trainer["CPU"] + engines


def plan_resources(config: TrainConfig, resources: Mapping[str, float], nodes: int | None = None) -> Layout:
    """Return what a recipe asks for.

    resources   of the whole cluster: with backend.device = "auto", a GPU or NPU among them is used
    nodes       machines of the trainer; left out: cluster.trainer_nodes
    """
    cluster, device = config.cluster, config.backend.device
    found = [name for name in ACCELERATORS.values() if resources.get(name)]
    accelerator = ACCELERATORS.get(device) or (next(iter(found), None) if device == "auto" else None)
    count = nodes or cluster.trainer_nodes
    colocated, engines = cluster.placement == "colocated", cluster.engines or 0
    if colocated and count < cluster.trainer_nodes:
        engines = engines // cluster.trainer_nodes * count
    rank: dict[str, float] = {"CPU": cluster.cpus_per_rank}
    if accelerator:
        rank[accelerator] = 1
    engine: dict[str, float] = {"CPU": cluster.cpus_per_engine}
    trainer = {name: number * cluster.ranks_per_node for name, number in rank.items()}
    if colocated:
        trainer["CPU"] += engine["CPU"] * (engines // count)
        if accelerator:
            _check_shares(engines // count, devices_per_engine(config.rollout.options), cluster.ranks_per_node)
    elif accelerator:
        engine[accelerator] = devices_per_engine(config.rollout.options)
    return Layout(trainer, engine, rank, count, cluster.ranks_per_node, engines, colocated, accelerator)


def _check_shares(engines: int, devices: int, ranks: int) -> None:
    if engines * devices > ranks:
        raise LayoutError(
            "the engines on a machine of the trainer need more devices than its ranks have",
            expected=f"engines x devices of each <= cluster.ranks_per_node = {ranks}",
            found=f"{engines} x {devices}",
            remedy="Lower cluster.engines, or tensor_parallel_size or data_parallel_size in rollout.options; or set "
            'cluster.placement = "separate"',
        )


def is_possible(config: TrainConfig, nodes: int) -> bool:
    """Return whether the parallel layout can be kept on this many machines of the trainer."""
    backend, ranks = config.backend, nodes * config.cluster.ranks_per_node
    expert_tensor = backend.expert_tensor_parallel or backend.tensor_parallel
    experts = expert_tensor * backend.expert_parallel * backend.pipeline_parallel
    return nodes > 0 and ranks % backend.model_parallel == 0 and ranks % experts == 0


class Place(NamedTuple):
    """Placement of an actor.

    devices   ids of its devices, as Ray assigned them
    port      that was free there
    """

    node: str
    address: str
    devices: tuple[str, ...]
    port: int


def rank_environments(places: Sequence[Place], layout: Layout, restarts: int) -> list[dict[str, str]]:
    """Return the variables that torchrun would set on each rank; ranks of one machine see all of its devices."""
    master = places[0]
    each = layout.ranks_per_node
    variables = []
    for number, _ in enumerate(places):
        node, local = divmod(number, each)
        own = {
            "RANK": number,
            "WORLD_SIZE": len(places),
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": each,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": len(places) // each,
            "ROLE_RANK": number,
            "ROLE_WORLD_SIZE": len(places),
            "MASTER_ADDR": master.address,
            "MASTER_PORT": master.port,
            "TORCHELASTIC_RESTART_COUNT": restarts,
        }
        if layout.accelerator:
            own[VISIBLE[layout.accelerator]] = ",".join(node_devices(places, layout, node))
        variables.append({name: str(value) for name, value in own.items()})
    return variables


def node_devices(places: Sequence[Place], layout: Layout, node: int) -> list[str]:
    """Return the devices of all ranks on one machine of the trainer, in the order of its ranks."""
    each = layout.ranks_per_node
    return [device for place in places[node * each : (node + 1) * each] for device in place.devices]


def engine_devices(config: TrainConfig, places: Sequence[Place], layout: Layout, number: int) -> dict[str, str]:
    """Return the variable that shows a colocated engine its share of the devices of its machine's ranks."""
    if layout.accelerator is None:
        return {}
    node, local = divmod(number, layout.engines // layout.nodes)
    each, devices = devices_per_engine(config.rollout.options), node_devices(places, layout, node)
    return {VISIBLE[layout.accelerator]: ",".join(devices[local * each : (local + 1) * each])}
