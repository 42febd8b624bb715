"""The nodes of a Ray cluster and what is free on them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moe_replay.cluster.capacity import Node, Resources, demand_of
from moe_replay.errors import ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.messages import one_line


class NoClusterError(MoeReplayError):
    """A Ray cluster that cannot be reached."""

    exit_status = ExitStatus.FAILED


def import_ray() -> Any:
    """Return the module `ray`; raise if it is not installed."""
    try:
        import ray
    except ImportError as missing:
        raise MissingExtraError('cluster.kind = "ray" needs Ray', remedy="pip install 'moe-replay[ray]'") from missing
    return ray


def known_address(address: str | None) -> str | None:
    """Return the cluster that a run would join; None: it would start one of this machine."""
    return address or os.environ.get("RAY_ADDRESS") or None


def nodes_of(config: TrainConfig) -> list[Node]:
    """Return the nodes of the cluster that a run would join, or this machine if it would start one.

    A cluster of this machine has as many CPUs as the run asks for: ranks and engines may share its cores.
    """
    joined = known_address(config.cluster.address)
    if joined is None and not import_ray().is_initialized():
        machine = [this_machine()]
        return [this_machine(demand_of(config, machine).cpus)]
    with connected(joined) as ray:
        return read_nodes(ray)


def this_machine(cpus: float = 0) -> Node:
    """Return this machine as the only node of a cluster, with at least `cpus` CPUs."""
    import torch

    from moe_replay.utils.device import accelerator

    gpus = torch.accelerator.device_count() if accelerator() is not None else 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    has = Resources(max(os.cpu_count() or 1, cpus), gpus, memory)
    return Node("this machine", has, has)


@contextmanager
def connected(address: str | None, namespace: str | None = None) -> Iterator[Any]:
    """Connect to a Ray cluster unless this process already is, and disconnect at the end."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=address or "auto",
            namespace=namespace,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=True,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NoClusterError(
            f"the Ray cluster at {address or 'auto'} cannot be reached: {one_line(error)}",
            remedy="Run this on a node of the cluster (`ray start --address HEAD:6379` makes this machine one), or on "
            "its head by `ray job submit`",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def read_nodes(ray: Any) -> list[Node]:
    """Return the live nodes of the cluster that this process is connected to."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(node["NodeManagerAddress"], resources_of(free.get(node["NodeID"], {})), resources_of(node["Resources"]))
        for node in alive
    ]


def resources_of(found: Mapping[str, float]) -> Resources:
    """Return resources by their names in Ray."""
    return Resources(found.get("CPU", 0), found.get("GPU", 0) or found.get("NPU", 0), found.get("memory", 0))
