"""The section `[cluster]`: who starts the ranks and the engines of a run, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moe_replay.train.config.section import Section


class ClusterConfig(Section):
    """The launcher of trainer and engines, and their machines."""

    kind: Literal["torchrun", "ray"] = "torchrun"
    """torchrun: the launcher of this command starts its ranks; ray: this command starts all ranks and engines as Ray
    actors (docs/cluster.md), and the other keys of this section say how many."""
    address: str | None = None
    """Ray cluster to join, e.g. 10.0.0.1:6379 or auto; left out: $RAY_ADDRESS, or a new cluster of this machine."""
    trainer_nodes: int = Field(1, ge=1, le=65536)
    """Machines that the trainer runs on."""
    ranks_per_node: int = Field(1, ge=1, le=1024)
    """Ranks on each of them, with a GPU each unless backend.device = cpu."""
    engines: int | None = Field(None, ge=1, le=65536)
    """Rollout engines of the whole run, each on as many GPUs as rollout.options asks for (tensor_parallel_size x
    data_parallel_size x pipeline_parallel_size); left out: the cluster starts none, and [rollout] says where the
    engine is."""
    placement: Literal["separate", "colocated"] = "separate"
    """separate: engines have their own GPUs; colocated: those of the trainer, evenly on all of its machines."""
    cpus_per_rank: int = Field(1, ge=1, le=65536)
    """CPU cores reserved for each rank, and its threads."""
    cpus_per_engine: int = Field(1, ge=1, le=65536)
    """CPU cores reserved for each engine, and its threads."""
    max_restarts: int = Field(3, ge=0)
    """Times that all ranks are started again from the newest checkpoint after one of them, or its machine, was lost;
    and times that each engine is."""
    node_timeout_s: float = Field(300.0, gt=0)
    """Seconds to wait for free machines: at the start, before the run fails; after one was lost, before it continues
    with those that are left."""

    @property
    def ranks(self) -> int:
        """Ranks of the trainer."""
        return self.trainer_nodes * self.ranks_per_node

    @property
    def starts_engines(self) -> bool:
        """Whether the cluster starts the rollout engines."""
        return self.kind == "ray" and self.engines is not None
