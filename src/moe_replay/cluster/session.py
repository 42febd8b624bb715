"""Starting or joining a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from moe_replay.cluster.board import NAMESPACE
from moe_replay.cluster.layout import plan_resources
from moe_replay.cluster.nodes import NoClusterError, import_ray
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.messages import one_line

LOCAL = "local"
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of a cluster that is started here: Ray's default is 15, as if ranks were a side job
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a warning of Ray about what it will do in another release
}


class ClusterError(MoeReplayError):
    """Ranks or engines of a run on Ray that failed, or were lost too often."""

    def __init__(self, problem: str, *, status: int = ExitStatus.FAILED, **parts: Any) -> None:
        super().__init__(problem, **parts)
        self.exit_status = status


class Session(NamedTuple):
    """A Ray cluster that this process is connected to.

    address     of the cluster
    dashboard   URL of Ray's dashboard; empty if it has none
    is_local    it was started for this run, and ends with it
    """

    address: str
    dashboard: str
    is_local: bool

    def describe(self) -> str:
        """Say in a line which cluster this is."""
        import ray

        total, machines = ray.cluster_resources(), len([node for node in ray.nodes() if node["Alive"]])
        parts = [f"{machines} machine{'s' * (machines != 1)}", f"{total.get('CPU', 0):g} CPUs"]
        parts += [f"{total[name]:g} {name}s" for name in ("GPU", "NPU") if total.get(name)]
        where = "a new cluster of this machine" if self.is_local else f"cluster at {self.address}"
        return f"{where} ({', '.join(parts)}); dashboard: {self.dashboard or 'none'}"


@contextmanager
def connected(config: TrainConfig) -> Iterator[Session]:
    """Join the cluster of the config or of $RAY_ADDRESS, or start one; a connection that exists already is used."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray = import_ray()
    if ray.is_initialized():
        yield Session(ray.get_runtime_context().gcs_address, "", False)
        return
    address = config.cluster.address or os.environ.get("RAY_ADDRESS") or LOCAL
    options: dict[str, Any] = {}
    if address == LOCAL:  # as many ranks and engines as asked for: this machine may share its cores among them
        options["num_cpus"] = max(os.cpu_count() or 1, int(plan_resources(config, {}).cpus))
    try:
        context: Any = ray.init(
            address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise NoClusterError(
            f"the Ray cluster cannot be joined: {one_line(error)}",
            found=f"cluster.address = {address!r}",
            remedy="`ray status` on its head shows whether it runs; leave the address out for a new one",
        ) from error
    try:
        dashboard = context.address_info.get("webui_url") or ""
        yield Session(context.address_info["gcs_address"], f"http://{dashboard}" if dashboard else "", address == LOCAL)
    finally:
        ray.shutdown()
