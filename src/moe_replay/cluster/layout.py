"""Ray resources of a run: placement bundles for ranks and engines, and the environment of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moe_replay.engines.base import devices_per_engine
from moe_replay.errors import LayoutError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.misc import VISIBLE_DEVICES

ACCELERATORS = {"cuda": "GPU", "npu": "NPU"}
"""Ray's resource name for each torch device type."""
VISIBLE = {name: VISIBLE_DEVICES[kind] for kind, name in ACCELERATORS.items()}


class Layout(NamedTuple):
    """Resources of a run, by Ray's resource names."""

    trainer: dict[str, float]  # per trainer node; includes those of colocated engines
    engine: dict[str, float]  # per engine, in its bundle
    rank: dict[str, float]  # per rank
    nodes: int  # trainer nodes
    ranks_per_node: int
    engines: int
    colocated: bool
    accelerator: str | None  # resource that ranks and engines compute on; None: CPUs

    @property
    def cpus(self) -> float:
        engines = 0 if self.colocated else self.engines * self.engine["CPU"]
        return self.nodes * self.trainer["CPU"] + engines


def plan_resources(config: TrainConfig, resources: Mapping[str, float], nodes: int | None = None) -> Layout:
    """Return the resources that a recipe needs.

    resources   of the whole cluster: with backend.device = "auto", a GPU or NPU among them is used
    nodes       trainer nodes; default: cluster.trainer_nodes
    """
    cluster, device = config.cluster, config.backend.device
    available = [name for name in ACCELERATORS.values() if resources.get(name)]
    accelerator = ACCELERATORS.get(device) or (next(iter(available), None) if device == "auto" else None)
    count = nodes or cluster.trainer_nodes
    colocated, engines = cluster.placement == "colocated", cluster.engines or 0
    if colocated and count < cluster.trainer_nodes:
        engines = engines // cluster.trainer_nodes * count
    rank: dict[str, float] = {"CPU": cluster.cpus_per_rank}
    if accelerator:
        rank[accelerator] = 1
    engine: dict[str, float] = {"CPU": cluster.cpus_per_engine}
    trainer = {name: amount * cluster.ranks_per_node for name, amount in rank.items()}
    if colocated:
        trainer["CPU"] += engine["CPU"] * (engines // count)
        if accelerator:
            _check_shared_devices(engines // count, devices_per_engine(config.rollout.options), cluster.ranks_per_node)
    elif accelerator:
        engine[accelerator] = devices_per_engine(config.rollout.options)
    return Layout(trainer, engine, rank, count, cluster.ranks_per_node, engines, colocated, accelerator)


def _check_shared_devices(engines: int, devices: int, ranks: int) -> None:
    if engines * devices > ranks:
        raise LayoutError(
            "the engines on a trainer node need more devices than its ranks have",
            expected=f"engines x devices per engine <= cluster.ranks_per_node = {ranks}",
            found=f"{engines} x {devices}",
            remedy="Lower cluster.engines, or tensor_parallel_size or data_parallel_size in rollout.options; or set "
            'cluster.placement = "separate"',
        )


def is_possible(config: TrainConfig, nodes: int) -> bool:
    """Return whether the parallel layout fits this many trainer nodes."""
    backend, ranks = config.backend, nodes * config.cluster.ranks_per_node
    expert_tensor = backend.expert_tensor_parallel or backend.tensor_parallel
    experts = expert_tensor * backend.expert_parallel * backend.pipeline_parallel
    return nodes > 0 and ranks % backend.model_parallel == 0 and ranks % experts == 0


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return Ray's options for an actor with these resources, which it does not restart."""
    others = dict(resources)
    cpus, gpus = others.pop("CPU"), others.pop("GPU", 0)
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": others, "max_restarts": 0}


class RankPlacement(NamedTuple):
    """Node, devices and port that Ray gave a rank."""

    node: str  # Ray's node id
    address: str
    devices: tuple[str, ...]  # device ids that Ray assigned
    port: int  # free port on that node


def rank_environments(placements: Sequence[RankPlacement], layout: Layout, restarts: int) -> list[dict[str, str]]:
    """Return each rank's environment variables, as torchrun sets them; ranks of a node see all of its devices."""
    master = placements[0]
    world, per_node = len(placements), layout.ranks_per_node
    environments = []
    for rank in range(world):
        node, local_rank = divmod(rank, per_node)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": world,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": per_node,
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": world // per_node,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world,
            "MASTER_ADDR": master.address,
            "MASTER_PORT": master.port,
            "TORCHELASTIC_RESTART_COUNT": restarts,
        }
        if layout.accelerator:
            variables[VISIBLE[layout.accelerator]] = ",".join(node_devices(placements, layout, node))
        environments.append({name: str(value) for name, value in variables.items()})
    return environments


def node_devices(placements: Sequence[RankPlacement], layout: Layout, node: int) -> list[str]:
    """Return the devices of all ranks on a trainer node, in rank order."""
    per_node = layout.ranks_per_node
    return [device for rank in placements[node * per_node : (node + 1) * per_node] for device in rank.devices]


def engine_devices(
    config: TrainConfig, placements: Sequence[RankPlacement], layout: Layout, index: int
) -> dict[str, str]:
    """Return the environment variable that shows a colocated engine its part of its node's devices."""
    if layout.accelerator is None:
        return {}
    node, local_index = divmod(index, layout.engines // layout.nodes)
    per_engine, devices = devices_per_engine(config.rollout.options), node_devices(placements, layout, node)
    return {VISIBLE[layout.accelerator]: ",".join(devices[local_index * per_engine : (local_index + 1) * per_engine])}
