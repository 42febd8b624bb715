"""`moe-replay cluster`: show or scale a run on a Ray cluster from another terminal."""

from __future__ import annotations

from typing import Literal

from moe_replay.errors import MoeReplayError


class ClusterCommand:
    """Show a run on a Ray cluster (cluster.launcher = ray), or change its number of rollout engines while it trains.

    Run it on a machine of the cluster. Engines join and leave between steps.

    Args:
        action: Print the status of the run, or scale its engines.
        engines: Target number of engines (scale); not with cluster.placement = colocated.
        run: Name of the run folder; optional if the cluster has one run.
        address: Cluster address, e.g. 10.0.0.1:6379; default: $RAY_ADDRESS, or the cluster of this machine.
        wait: Wait up to this many seconds for the engines (scale), and fail if they are not ready by then.
    """

    def __init__(
        self,
        action: Literal["status", "scale"],
        /,
        *,
        engines: int | None = None,
        run: str | None = None,
        address: str | None = None,
        wait: float | None = None,
    ) -> None:
        self.action = action
        self.engines = engines
        self.run = run
        self.address = address
        self.wait = wait

    def __call__(self) -> None:
        """Print the status of the run, or request another number of engines."""
        if (self.action == "scale") != (self.engines is not None):
            raise MoeReplayError("`moe-replay cluster scale` requires --engines; `status` does not take it")
        from moe_replay.cluster.connection import join
        from moe_replay.cluster.control import RunControl

        with join(self.address):
            run = RunControl(self.run)
            if self.engines is None:
                print(run.status(), flush=True)
                return
            before = run.scale(self.engines)
            print(f"{before.name}: {before.desired_engines} -> {self.engines} engines, between steps", flush=True)
            if self.wait is not None:
                print(run.wait(self.wait), flush=True)
