"""Status and scaling of a run on Ray from another process: the back end of `moe-replay cluster`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from moe_replay.cluster.capacity import CapacityError, Resources, read_nodes, resources_of
from moe_replay.cluster.state_actor import NAMESPACE, PREFIX, actor_name
from moe_replay.errors import ExitStatus, MoeReplayError

POLL_S = 0.5
REPLY_TIMEOUT_S = 60.0


class NoRunError(MoeReplayError):
    """A run that is not on the cluster, or that cannot be scaled."""


class RunStatus(NamedTuple):
    """Status of a run."""

    name: str
    desired_engines: int  # number last set by the recipe or by `scale`
    urls: tuple[str, ...]  # engines that are ready
    starting: int  # engines being started or waiting for resources
    error: str  # why no more engines will start; empty otherwise
    can_scale: bool  # the number of engines may change
    engine: Mapping[str, float]  # of each engine, by Ray's resource names
    events: tuple[str, ...]  # log lines, newest last

    @property
    def is_settled(self) -> bool:
        return len(self.urls) == self.desired_engines and not self.starting

    def __str__(self) -> str:
        engines = f"{len(self.urls)} of {self.desired_engines} engines ready, {self.starting} starting"
        lines = [f"{self.name}: {engines}" + f"; {self.error}" * bool(self.error)]
        return "\n".join([*lines, *(f"  {url}" for url in self.urls), *(f"  {text}" for text in self.events[-5:])])


class RunControl:
    """One run on the cluster that this process is connected to.

    name   of its run folder; None: the only run
    """

    def __init__(self, name: str | None = None) -> None:
        import ray

        names = run_names()
        if name is None and len(names) == 1:
            name = names[0]
        if not names:
            raise NoRunError(
                "the cluster has no run",
                expected="a run with cluster.launcher = ray",
                found=name,
                remedy="Runs under torchrun use the servers in rollout.urls",
            )
        if name not in names:
            raise NoRunError(
                "the cluster has no run with this name" if name else "the cluster has several runs",
                expected=f"--run and one of {', '.join(names)}",
                found=name or f"{len(names)} runs",
            )
        self._name = name
        self._state = ray.get_actor(actor_name(name), namespace=NAMESPACE)

    def status(self) -> RunStatus:
        """Return the current status; raise if the run has ended."""
        import ray

        try:
            status: Any = ray.get(self._state.status.remote(), timeout=REPLY_TIMEOUT_S)
        except ray.exceptions.RayActorError as error:
            raise NoRunError(f"run {self._name} has ended") from error
        except ray.exceptions.GetTimeoutError as error:
            raise NoRunError(f"run {self._name} did not reply within {REPLY_TIMEOUT_S:g} s") from error
        return RunStatus(self._name, **status)

    def scale(self, engines: int) -> RunStatus:
        """Set the number of engines, which join and leave between steps; returns the status before."""
        import ray

        before = self.status()
        if engines < 1:
            raise NoRunError("a run needs at least one engine", found=engines)
        if not before.can_scale:
            raise NoRunError(
                f"run {self._name} cannot be scaled",
                expected='cluster.engines with cluster.placement = "separate"',
                remedy="The number of colocated engines is fixed by the recipe",
            )
        self._check_capacity(engines - len(before.urls) - before.starting, resources_of(before.engine))
        ray.get(self._state.scale.remote(engines), timeout=REPLY_TIMEOUT_S)
        return before

    def _check_capacity(self, added: int, engine: Resources) -> None:
        import ray

        fitting = sum(node.free.fits(engine) for node in read_nodes(ray))
        if added > fitting:
            raise CapacityError(
                f"the cluster is too small for {added} more engines",
                expected=f"{engine} free on one machine for each",
                found=f"capacity for {fitting}",
                remedy="Add machines (`ray start --address`), or request fewer engines",
            )

    def wait(self, timeout_s: float) -> RunStatus:
        """Wait until the desired number of engines is ready; raise after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not (status := self.status()).is_settled:
            if status.error or time.monotonic() > deadline:
                error = NoRunError(
                    f"{len(status.urls)} of {status.desired_engines} engines are ready after {timeout_s:g} s",
                    found=status.error or f"{status.starting} starting",
                )
                error.exit_status = ExitStatus.FAILED
                raise error
            time.sleep(POLL_S)
        return status


def run_names() -> list[str]:
    """Return the names of all runs on the cluster that this process is connected to."""
    from ray.util import list_named_actors

    names = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    return sorted(name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
