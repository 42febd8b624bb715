"""Whether a cluster can hold a run: what ranks and engines ask of its nodes, and what is missing.

    check_capacity(nodes, demand_of(config, nodes))     # before anything is started: a placement group would wait

Numbers alone; `nodes.py` reads those of a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from moe_replay.cluster.layout import Layout, plan_resources
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.units import GIB

_SHOWN_NODES = 8


class CapacityError(MoeReplayError):
    """A cluster that cannot hold a run."""

    exit_status = ExitStatus.CHECK_FAILED


class Resources(NamedTuple):
    """CPU cores, GPUs (or NPUs) and bytes of host memory: of a node, or of what is placed on it."""

    cpus: float = 0
    gpus: float = 0
    memory: float = 0

    def times(self, count: int) -> Self:
        """Return the resources of `count` of them together."""
        return type(self)(*(count * one for one in self))

    def plus(self, other: Resources) -> Self:
        """Return the sum."""
        return type(self)(*(a + b for a, b in zip(self, other, strict=True)))

    def minus(self, other: Resources) -> Self:
        """Return what is left."""
        return type(self)(*(a - b for a, b in zip(self, other, strict=True)))

    def fits(self, other: Resources) -> int:
        """Return how many times `other` fits into this."""
        return max(int(min((a // b for a, b in zip(self, other, strict=True) if b), default=0)), 0)

    def __str__(self) -> str:
        parts = [_counted(self.gpus, "GPU")] * (self.gpus > 0) + [_counted(self.cpus, "CPU")]
        return ", ".join(parts + [f"{self.memory / GIB:.1f} GiB"] * (self.memory > 0))


class Node(NamedTuple):
    """A machine of a cluster.

    free    what no other job has reserved
    total   what it has
    """

    name: str
    free: Resources
    total: Resources


class Demand(NamedTuple):
    """Resources that a run asks of a cluster.

    trainer   of each of `trainer_nodes` machines: its ranks, and where engines share their GPUs, these too
    engine    of one engine, on one machine; `engines` of them need their own resources
    """

    trainer_nodes: int
    trainer: Resources
    engines: int
    engine: Resources

    @property
    def cpus(self) -> float:
        """CPU cores of the whole run."""
        return self.trainer_nodes * self.trainer.cpus + self.engines * self.engine.cpus


def demand_of(config: TrainConfig, nodes: Sequence[Node], rank_memory: float = 0, engine_memory: float = 0) -> Demand:
    """Return what a run asks of a cluster by its `[cluster]` section.

    nodes                        of the cluster: with backend.device = "auto", accelerators among them are used
    rank_memory, engine_memory   bytes of host memory of one rank and of one engine; 0: not checked
    """
    layout = plan_resources(config, {"GPU": sum(node.total.gpus for node in nodes)})
    on_a_node = layout.engines // layout.nodes if layout.colocated else 0
    demand = demand_of_layout(layout)
    memory = rank_memory * layout.ranks_per_node + engine_memory * on_a_node
    return demand._replace(
        trainer=demand.trainer._replace(memory=memory), engine=demand.engine._replace(memory=engine_memory)
    )


def demand_of_layout(layout: Layout) -> Demand:
    """Return what a run with these resources asks of a cluster."""
    device = layout.accelerator or "GPU"
    trainer, engine = (Resources(one["CPU"], one.get(device, 0)) for one in (layout.trainer, layout.engine))
    return Demand(layout.nodes, trainer, 0 if layout.colocated else layout.engines, engine)


def check_capacity(nodes: Sequence[Node], demand: Demand) -> str:
    """Return how a run fits into a cluster; raise if it does not.

    Every node of the trainer is a separate machine; engines go wherever there is space.
    """
    missing = list(_missing(nodes, demand))
    asked = _asked(demand)
    if not missing:
        return f"{asked} on {_counted(len(nodes), 'node')}"
    raise CapacityError(
        f"the cluster cannot hold the run: {'; '.join(missing)}",
        expected=asked,
        found=_found(nodes),
        remedy=_remedy(nodes, demand),
    )


def most_engines(nodes: Sequence[Node], demand: Demand) -> int:
    """Return how many engines find a place beside the trainer."""
    return _places(nodes, demand)[1]


def _places(nodes: Sequence[Node], demand: Demand, part: str = "free") -> tuple[int, int]:
    """Return the trainer's nodes that find a machine, and the engines that find a place beside them.

    The trainer gets the machines on which it costs the fewest engines.
    """
    each = [getattr(node, part) for node in nodes]
    able = [one for one in each if one.fits(demand.trainer)]
    cost = sorted(one.fits(demand.engine) - one.minus(demand.trainer).fits(demand.engine) for one in able)
    placed = min(len(able), demand.trainer_nodes)
    return placed, sum(one.fits(demand.engine) for one in each) - sum(cost[:placed])


def _missing(nodes: Sequence[Node], demand: Demand) -> Iterable[str]:
    trainers, engines = _places(nodes, demand)
    if trainers < demand.trainer_nodes:
        yield (
            f"{trainers} of {_counted(demand.trainer_nodes, 'machine')} of the trainer found a place, "
            f"each needs {demand.trainer} on one machine"
        )
    elif engines < demand.engines:
        yield (
            f"{engines} of {_counted(demand.engines, 'engine')} found a place beside the trainer, "
            f"each needs {demand.engine} on one machine"
        )


def _remedy(nodes: Sequence[Node], demand: Demand) -> str:
    if _places(nodes, demand, "total") >= (demand.trainer_nodes, demand.engines):
        return "Wait for other jobs of the cluster, which have reserved the rest, or end them (`ray status` lists them)"
    trainers, engines = _places(nodes, demand)
    if trainers < demand.trainer_nodes:
        lower = f"set cluster.trainer_nodes = {trainers}" if trainers else "lower cluster.ranks_per_node"
        return f"Add {_counted(demand.trainer_nodes - trainers, 'machine')} with {demand.trainer} free, or {lower}"
    lower = f", or set cluster.engines = {engines}" if engines else ""
    return f"Add machines with {demand.engine} free for {_counted(demand.engines - engines, 'engine')}{lower}"


def _asked(demand: Demand) -> str:
    trainer = f"{_counted(demand.trainer_nodes, 'machine')} of the trainer with {demand.trainer} each"
    engines = f", {_counted(demand.engines, 'engine')} with {demand.engine} each" if demand.engines else ""
    return trainer + engines


def _found(nodes: Sequence[Node]) -> str:
    if not nodes:
        return "no nodes"
    shown = [f"{node.name} {node.free}" + (f" of {node.total}" if node.free != node.total else "") for node in nodes]
    more = [f"{len(nodes) - _SHOWN_NODES} more"] * (len(nodes) > _SHOWN_NODES)
    return "free on " + "; ".join(shown[:_SHOWN_NODES] + more)


def _counted(count: float, what: str) -> str:
    return f"{count:g} {what}{'s' * (count != 1)}"
