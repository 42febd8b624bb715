"""Joining or starting a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from moe_replay.cluster.layout import plan_resources
from moe_replay.cluster.state_actor import NAMESPACE
from moe_replay.errors import ExitStatus, MissingExtraError, MoeReplayError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.misc import one_line

LOCAL = "local"
CONNECT_S = 5.0
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # for a cluster started here: Ray's default of 15 would make ranks a background job
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # silences Ray's warning about a change in a later release
}


class NoClusterError(MoeReplayError):
    """A Ray cluster that cannot be reached."""

    exit_status = ExitStatus.FAILED


class Connection(NamedTuple):
    """The Ray cluster that this process is connected to."""

    address: str
    dashboard: str  # URL of Ray's dashboard; empty if there is none
    is_local: bool  # started for this run, ends with it

    def describe(self) -> str:
        import ray

        total, nodes = ray.cluster_resources(), len([node for node in ray.nodes() if node["Alive"]])
        parts = [f"{nodes} node{'s' * (nodes != 1)}", f"{total.get('CPU', 0):g} CPUs"]
        parts += [f"{total[name]:g} {name}s" for name in ("GPU", "NPU") if total.get(name)]
        cluster = "new local cluster" if self.is_local else f"cluster at {self.address}"
        return f"{cluster} ({', '.join(parts)}); dashboard: {self.dashboard or 'none'}"


def import_ray() -> Any:
    try:
        import ray
    except ImportError as missing:
        raise MissingExtraError(
            'cluster.launcher = "ray" needs Ray', remedy="pip install 'moe-replay[ray]'"
        ) from missing
    return ray


def configured_address(address: str | None) -> str | None:
    """Return the address of the cluster that a run would join; None: it would start a local one."""
    found = address or os.environ.get("RAY_ADDRESS")
    return None if found == LOCAL else found or None


def _check_listens(address: str) -> None:
    """Raise if nothing listens at the address of a cluster, for which Ray would wait for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


@contextmanager
def join_or_start(config: TrainConfig) -> Iterator[Connection]:
    """Join the cluster at cluster.address or $RAY_ADDRESS, or start a local one; reuses an existing connection."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray = import_ray()
    if ray.is_initialized():
        yield Connection(ray.get_runtime_context().gcs_address, "", False)
        return
    address = configured_address(config.cluster.address) or LOCAL
    options: dict[str, Any] = {"namespace": NAMESPACE}
    if address == LOCAL:  # one machine may share its cores among more ranks and engines than it has cores
        options["num_cpus"] = max(os.cpu_count() or 1, int(plan_resources(config, {}).cpus))
    remedy = "Check that it is up with `ray status` on its head node; omit cluster.address to start a new one"
    with _connected(ray, address, remedy, **options) as context:
        info = context.address_info
        dashboard = info.get("webui_url") or ""
        yield Connection(info["gcs_address"], f"http://{dashboard}" if dashboard else "", address == LOCAL)


@contextmanager
def join(address: str | None) -> Iterator[Any]:
    """Connect to a running cluster unless this process already is connected; yields the module `ray`."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    remedy = (
        "Run this on a node of the cluster (`ray start --address HEAD:6379` adds this machine), or on its head with "
        "`ray job submit`"
    )
    with _connected(ray, configured_address(address) or "auto", remedy):
        yield ray


@contextmanager
def _connected(ray: Any, address: str, remedy: str, **options: Any) -> Iterator[Any]:
    """Be connected to a cluster inside this context; yields Ray's context.

    remedy   if the cluster cannot be reached
    """
    try:
        _check_listens(address)
        context = ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # of no other type where a node does not start in time
        if address == LOCAL:
            problem, remedy = "a local Ray cluster did not start", "Its logs are in /tmp/ray/session_latest/logs"
        else:
            problem = f"cannot reach the Ray cluster at {address}"
        raise NoClusterError(f"{problem}: {one_line(error)}", remedy=remedy) from error
    try:
        yield context
    finally:
        ray.shutdown()
