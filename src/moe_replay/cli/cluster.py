"""`moe-replay cluster`: a run on a Ray cluster, seen and scaled from another terminal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from moe_replay.errors import EXIT_CODES, MoeReplayError

INTRODUCTION = """\
usage: moe-replay cluster status [--run NAME] [--address ADDRESS]
       moe-replay cluster scale --engines N [--run NAME] [--address ADDRESS] [--wait SECONDS]

Show a run on a Ray cluster (cluster.kind = ray), or change how many rollout engines it has while it trains: engines
join and leave between steps. To be called on a machine of the cluster.

  --engines N         Engines that the run is to have; not with cluster.placement = colocated.
  --run NAME          Name of the run's folder; may be left out where there is one run.
  --address ADDRESS   Cluster, e.g. 10.0.0.1:6379; left out: $RAY_ADDRESS, or the one on this machine.
  --wait SECONDS      Return when the engines are there, and fail if they are not by then.
"""


@dataclass(frozen=True)
class ClusterCommand:
    """Show or scale a run on a Ray cluster."""

    action: str = ""
    engines: int | None = None
    run: str | None = None
    address: str | None = None
    wait: float | None = None

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> ClusterCommand:
        """Parse without tyro: the options depend on the action."""
        parser = argparse.ArgumentParser("moe-replay cluster", add_help=False)
        parser.add_argument("action", nargs="?", default="")
        parser.add_argument("--engines", type=int)
        parser.add_argument("--run")
        parser.add_argument("--address")
        parser.add_argument("--wait", type=float)
        parser.add_argument("-h", "--help", action="store_true")
        found, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise MoeReplayError(f"{unknown[0]}: no such option", remedy="`moe-replay cluster --help` lists them")
        action = "help" if found.help else found.action
        return cls(action, found.engines, found.run, found.address, found.wait)

    def __call__(self) -> None:
        """Print the status of the run, or ask it for another number of engines."""
        if self.action in ("", "help"):
            print(f"{INTRODUCTION}\n{EXIT_CODES}", end="")
            return
        if self.action not in ("status", "scale"):
            raise MoeReplayError(f"{self.action}: no such action of `moe-replay cluster`", expected="status or scale")
        if (self.action == "scale") != (self.engines is not None):
            raise MoeReplayError("`moe-replay cluster scale` takes --engines, and nothing else does")
        from moe_replay.cluster.control import RunControl
        from moe_replay.cluster.nodes import connected

        with connected(self.address):
            run = RunControl(self.run)
            if self.engines is None:
                print(run.status(), flush=True)
                return
            before = run.scale(self.engines)
            print(f"{before.name}: {before.wanted} -> {self.engines} engines, between steps", flush=True)
            if self.wait is not None:
                print(run.wait(self.wait), flush=True)
