"""What `moe-replay cluster` does with a run on a Ray cluster: shows it, and changes how many engines it has."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from moe_replay.cluster.board import NAMESPACE, PREFIX, board_name
from moe_replay.cluster.capacity import CapacityError, Resources
from moe_replay.cluster.nodes import read_nodes, resources_of
from moe_replay.errors import ExitStatus, MoeReplayError

PAUSE_S = 0.5
ANSWER_S = 60.0


class NoRunError(MoeReplayError):
    """A run that is not on the cluster, or that cannot be scaled."""


class RunStatus(NamedTuple):
    """Status of a run.

    wanted       engines that were asked for last
    urls         addresses of those that are ready
    starting     engines that are being started, or wait for a place
    error        why there will be no more engines
    can_change   their number may change
    engine       what each of them needs
    events       what has happened, the newest last
    """

    name: str
    wanted: int
    urls: tuple[str, ...]
    starting: int
    error: str
    can_change: bool
    engine: Resources
    events: tuple[str, ...]

    @property
    def is_settled(self) -> bool:
        """Whether there are as many engines as were asked for."""
        return len(self.urls) == self.wanted and not self.starting

    def __str__(self) -> str:
        engines = f"{len(self.urls)} of {self.wanted} engines ready, {self.starting} starting"
        lines = [f"{self.name}: {engines}" + f"; {self.error}" * bool(self.error)]
        return "\n".join([*lines, *(f"  {url}" for url in self.urls), *(f"  {text}" for text in self.events[-5:])])


class RunControl:
    """One run of the cluster that this process is connected to.

    name   of the run, which is that of its folder; None: the only one
    """

    def __init__(self, name: str | None = None) -> None:
        import ray

        names = run_names()
        if name is None and len(names) == 1:
            name = names[0]
        if name not in names:
            raise NoRunError(
                "no run of this name is on the cluster" if name else "which run is meant?",
                expected=f"--run and one of {', '.join(names)}" if names else "a run with cluster.kind = ray",
                found=name if name else f"{len(names)} runs",
                remedy=None if names else "Runs under torchrun have the servers that rollout.urls names",
            )
        self._name = name
        self._board = ray.get_actor(board_name(name), namespace=NAMESPACE)

    def status(self) -> RunStatus:
        """Return what is known of the run now; raise if it has ended."""
        import ray

        try:
            told: Any = ray.get(self._board.status.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayActorError as error:
            raise NoRunError(f"the run {self._name} has ended") from error
        except ray.exceptions.GetTimeoutError as error:
            raise NoRunError(f"the run {self._name} does not answer within {ANSWER_S:g} s") from error
        return RunStatus(
            self._name,
            told["wanted"],
            tuple(told["urls"]),
            told["starting"],
            told["error"],
            told["can_change"],
            resources_of(told["engine"]),
            tuple(told["events"]),
        )

    def scale(self, engines: int) -> RunStatus:
        """Ask for another number of engines, which join and leave between steps; returns the status before."""
        import ray

        before = self.status()
        if engines < 1:
            raise NoRunError("a run needs at least one engine", found=engines)
        if not before.can_change:
            raise NoRunError(
                f"the number of engines of {self._name} cannot change",
                expected='cluster.engines with cluster.placement = "separate"',
                remedy="Engines on the trainer's GPUs are as many as its recipe says",
            )
        self._check_room(engines - before.wanted, before.engine)
        ray.get(self._board.scale.remote(engines), timeout=ANSWER_S)
        return before

    def _check_room(self, more: int, engine: Resources) -> None:
        import ray

        nodes = read_nodes(ray)
        room = sum(node.free.fits(engine) for node in nodes)
        if more > room:
            raise CapacityError(
                f"the cluster cannot hold {more} more engines",
                expected=f"{engine} free on one machine for each",
                found=f"room for {room}",
                remedy="Add machines (`ray start --address`), or ask for fewer",
            )

    def wait(self, seconds: float) -> RunStatus:
        """Wait until there are as many engines as were asked for; raise if there are not within `seconds`."""
        end = time.monotonic() + seconds
        while not (found := self.status()).is_settled:
            if found.error or time.monotonic() > end:
                error = NoRunError(
                    f"{len(found.urls)} of {found.wanted} engines are ready after {seconds:g} s",
                    found=found.error or f"{found.starting} starting",
                )
                error.exit_status = ExitStatus.FAILED
                raise error
            time.sleep(PAUSE_S)
        return found


def run_names() -> list[str]:
    """Return the names of all runs on the cluster that this process is connected to."""
    from ray.util import list_named_actors

    named = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(PREFIX) for name in named if name.startswith(PREFIX))
