"""`moe-replay cluster`: show or scale a run on a Ray cluster from another terminal."""

from __future__ import annotations

from typing import Literal

from moe_replay.errors import MoeReplayError


def cluster(
    action: Literal["status", "scale"],
    /,
    *,
    engines: int | None = None,
    run: str | None = None,
    address: str | None = None,
    wait: float | None = None,
) -> None:
    """Show a run on a Ray cluster (cluster.launcher = ray), or change its number of rollout engines while it trains.

    Run it on a machine of the cluster. Engines join and leave between steps.

    Args:
        action: Print the status of the run, or scale its engines.
        engines: Target number of engines (scale); not with cluster.placement = colocated.
        run: Name of the run folder; optional if the cluster has one run.
        address: Cluster address, e.g. 10.0.0.1:6379; default: $RAY_ADDRESS, or the cluster of this machine.
        wait: Wait up to this many seconds for the engines (scale), and fail if they are not ready by then.
    """
    if (action == "scale") != (engines is not None):
        raise MoeReplayError("`moe-replay cluster scale` requires --engines; `status` does not take it")
    from moe_replay.cluster.connection import join
    from moe_replay.cluster.control import RunControl

    with join(address):
        control = RunControl(run)
        if engines is None:
            print(control.status(), flush=True)
            return
        before = control.scale(engines)
        print(f"{before.name}: {before.desired_engines} -> {engines} engines, between steps", flush=True)
        if wait is not None:
            print(control.wait(wait), flush=True)
