"""Whether a Ray cluster has the resources that a run needs, and waiting until it does.

nodes = nodes_of(config)
check_capacity(nodes, demand_of(config, nodes))     # before anything is started: a placement group would wait
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from moe_replay.cluster.connection import configured_address, import_ray, join
from moe_replay.cluster.layout import Layout, plan_resources
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.misc import GIB

_SHOWN_NODES = 8
POLL_S = 1.0


class CapacityError(MoeReplayError):
    """A cluster that is too small for a run."""

    exit_status = ExitStatus.CHECK_FAILED


class Resources(NamedTuple):
    """CPU cores, GPUs (or NPUs) and bytes of host memory."""

    cpus: float = 0
    gpus: float = 0
    memory: float = 0

    def minus(self, other: Resources) -> Self:
        return type(self)(*(a - b for a, b in zip(self, other, strict=True)))

    def fits(self, other: Resources) -> int:
        """Return how many times `other` fits into this."""
        return max(int(min((a // b for a, b in zip(self, other, strict=True) if b), default=0)), 0)

    def __str__(self) -> str:
        parts = [counted(self.gpus, "GPU")] * (self.gpus > 0) + [counted(self.cpus, "CPU")]
        return ", ".join(parts + [f"{self.memory / GIB:.1f} GiB"] * (self.memory > 0))


class Node(NamedTuple):
    """A machine of the cluster; `free` is what no other job has reserved."""

    name: str
    free: Resources
    total: Resources


class Demand(NamedTuple):
    """Resources that a run needs."""

    trainer_nodes: int
    trainer: Resources  # per trainer node: its ranks and, where engines share their GPUs, those engines
    engines: int
    engine: Resources  # per engine, all on one node; `engines` counts those with separate resources


def demand_of(config: TrainConfig, nodes: Sequence[Node], rank_memory: float = 0, engine_memory: float = 0) -> Demand:
    """Return what a run needs by its `[cluster]` section.

    nodes                        of the cluster: with backend.device = "auto", their accelerators are used
    rank_memory, engine_memory   bytes of host memory per rank and per engine; 0: not checked
    """
    layout = plan_resources(config, {"GPU": sum(node.total.gpus for node in nodes)})
    engines_on_node = layout.engines // layout.nodes if layout.colocated else 0
    demand = demand_of_layout(layout)
    memory = rank_memory * layout.ranks_per_node + engine_memory * engines_on_node
    return demand._replace(
        trainer=demand.trainer._replace(memory=memory), engine=demand.engine._replace(memory=engine_memory)
    )


def demand_of_layout(layout: Layout) -> Demand:
    device = layout.accelerator or "GPU"
    trainer, engine = (Resources(part["CPU"], part.get(device, 0)) for part in (layout.trainer, layout.engine))
    return Demand(layout.nodes, trainer, 0 if layout.colocated else layout.engines, engine)


# ---- nodes of a cluster ----------------------------------------------------------------------------------------------


def nodes_of(config: TrainConfig) -> list[Node]:
    """Return the nodes of the cluster that a run would join, or this machine if it would start a local cluster.

    A local cluster has as many CPUs as the run needs: ranks and engines may share its cores.
    """
    address = configured_address(config.cluster.address)
    if address is None and not import_ray().is_initialized():
        machine = _this_machine()
        return [_this_machine(plan_resources(config, {"GPU": machine.total.gpus}).cpus)]
    with join(address) as ray:
        return read_nodes(ray)


def _this_machine(min_cpus: float = 0) -> Node:
    import torch

    from moe_replay.utils.device import accelerator

    gpus = torch.accelerator.device_count() if accelerator() is not None else 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = Resources(max(os.cpu_count() or 1, min_cpus), gpus, memory)
    return Node("this machine", total, total)


def read_nodes(ray: Any) -> list[Node]:
    """Return the live nodes of the cluster that this process is connected to."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(node["NodeManagerAddress"], resources_of(free.get(node["NodeID"], {})), resources_of(node["Resources"]))
        for node in alive
    ]


def resources_of(amounts: Mapping[str, float]) -> Resources:
    """Convert a mapping with Ray's resource names."""
    return Resources(amounts.get("CPU", 0), amounts.get("GPU", 0) or amounts.get("NPU", 0), amounts.get("memory", 0))


# ---- the check -------------------------------------------------------------------------------------------------------


def check_capacity(nodes: Sequence[Node], demand: Demand) -> str:
    """Return in words how a run fits into a cluster; raise if it does not.

    Every trainer node is a separate machine; engines go wherever they fit.
    """
    missing, required = _missing(nodes, demand), _required(demand)
    if not missing:
        return f"{required} on {counted(len(nodes), 'node')}"
    raise CapacityError(
        f"the cluster is too small for the run: {missing}",
        expected=required,
        found=_free(nodes),
        remedy=_remedy(nodes, demand),
    )


def wait_for_capacity(layout: Layout, timeout_s: float, log: Callable[[str], None]) -> None:
    """Wait for resources that other jobs hold; raise after the timeout, or if even an idle cluster is too small."""
    import ray

    demand, deadline, is_logged = demand_of_layout(layout), time.monotonic() + timeout_s, False
    while True:
        nodes = read_nodes(ray)
        check_capacity([node._replace(free=node.total) for node in nodes], demand)
        try:
            check_capacity(nodes, demand)
            return
        except CapacityError as full:
            if time.monotonic() > deadline:
                raise
            if not is_logged and time.monotonic() > deadline - timeout_s + POLL_S:
                is_logged = True
                log(f"waiting up to {timeout_s:g} s for other jobs to finish: {full.problem}")
        time.sleep(POLL_S)


def _fitting(nodes: Sequence[Node], demand: Demand, part: str = "free") -> tuple[int, int]:
    """Return how many trainer nodes fit, and how many engines fit next to them.

    The trainer gets the machines on which it displaces the fewest engines.
    """
    amounts: list[Resources] = [getattr(node, part) for node in nodes]
    able = [amount for amount in amounts if amount.fits(demand.trainer)]
    displaced = sorted(amount.fits(demand.engine) - amount.minus(demand.trainer).fits(demand.engine) for amount in able)
    placed = min(len(able), demand.trainer_nodes)
    return placed, sum(amount.fits(demand.engine) for amount in amounts) - sum(displaced[:placed])


def _missing(nodes: Sequence[Node], demand: Demand) -> str:
    """Return what does not fit; empty if everything does."""
    trainer_nodes, engines = _fitting(nodes, demand)
    if trainer_nodes < demand.trainer_nodes:
        found = f"{trainer_nodes} of {counted(demand.trainer_nodes, 'trainer node')} found"
        return f"{found}, each needs {demand.trainer} on one machine"
    if engines < demand.engines:
        found = f"{engines} of {counted(demand.engines, 'engine')} fit next to the trainer"
        return f"{found}, each needs {demand.engine} on one machine"
    return ""


def _remedy(nodes: Sequence[Node], demand: Demand) -> str:
    if _fitting(nodes, demand, "total") >= (demand.trainer_nodes, demand.engines):
        return "Wait for the other jobs that hold these resources, or stop them (`ray status` lists them)"
    trainer_nodes, engines = _fitting(nodes, demand)
    if trainer_nodes < demand.trainer_nodes:
        lower = f"set cluster.trainer_nodes = {trainer_nodes}" if trainer_nodes else "lower cluster.ranks_per_node"
        return f"Add {counted(demand.trainer_nodes - trainer_nodes, 'machine')} with {demand.trainer} free, or {lower}"
    lower = f", or set cluster.engines = {engines}" if engines else ""
    return f"Add machines with {demand.engine} free for {counted(demand.engines - engines, 'engine')}{lower}"


def _required(demand: Demand) -> str:
    trainer = f"{counted(demand.trainer_nodes, 'trainer node')} with {demand.trainer} each"
    engines = f", {counted(demand.engines, 'engine')} with {demand.engine} each" if demand.engines else ""
    return trainer + engines


def _free(nodes: Sequence[Node]) -> str:
    if not nodes:
        return "no nodes"
    shown = [f"{node.name} {node.free}" + (f" of {node.total}" if node.free != node.total else "") for node in nodes]
    more = [f"{len(nodes) - _SHOWN_NODES} more"] * (len(nodes) > _SHOWN_NODES)
    return "free on " + "; ".join(shown[:_SHOWN_NODES] + more)


def counted(count: float, noun: str) -> str:
    """Return a number of things in words."""
    return f"{count:g} {noun}{'s' * (count != 1)}"
