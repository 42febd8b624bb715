"""Whether the Ray cluster of a recipe can hold it, as a finding of `doctor`."""

from __future__ import annotations

from moe_replay.cluster.capacity import CapacityError
from moe_replay.cluster.nodes import known_address
from moe_replay.errors import MoeReplayError
from moe_replay.tools.doctor import Finding, Status
from moe_replay.tools.dry_run import cluster_fit
from moe_replay.train.config.train_config import TrainConfig


def diagnose_cluster(config: TrainConfig) -> Finding:
    """Check whether a recipe fits into its Ray cluster."""
    if config.cluster.kind != "ray":
        return Finding("cluster", Status.NOTE, "none", "the recipe starts no cluster", "Set cluster.kind = ray")
    where = known_address(config.cluster.address) or "this machine"
    try:
        return Finding("cluster", Status.OK, where, f"holds {cluster_fit(config)}")
    except CapacityError as missing:
        return Finding("cluster", Status.BROKEN, where, f"{missing.problem} ({missing.found})", missing.remedy or "")
    except MoeReplayError as problem:
        return Finding("cluster", Status.BROKEN, where, problem.problem, problem.remedy or "")
