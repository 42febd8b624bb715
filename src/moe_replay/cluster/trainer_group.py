"""The ranks of a run, as the driver sees them: placed together, started together, and ended together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_replay.cluster.layout import Layout, Place, rank_environments
from moe_replay.cluster.rank_actor import Outcome, RankActor
from moe_replay.errors import ExitStatus
from moe_replay.utils.messages import one_line

END_S = 60.0
SETTLE_S = 60.0
"""Seconds in which the other ranks end after one of them has; those that do not are killed."""


def cause_of(error: BaseException) -> str:
    """Return in a few words why Ray says an actor has died."""
    text = one_line(error, 2000)
    if "unavailable" in text:
        return "it cannot be reached"
    found = re.search(r"The actor (?:is dead because|died because of) ([^.]*)", text)
    return found[1].strip() if found else one_line(error)


class Lost(NamedTuple):
    """A rank whose process is gone."""

    cause: str


class TrainerGroup:
    """All ranks of one start of the trainer.

    group   placement group, with a bundle for each machine
    """

    def __init__(self, layout: Layout, group: Any) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._layout = layout
        resources = dict(layout.rank)
        remote: Any = ray.remote(RankActor)
        options = {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
            "max_restarts": 0,
        }
        self._actors: list[Any] = []
        for node in range(layout.nodes):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            for _ in range(layout.ranks_per_node):
                self._actors.append(remote.options(scheduling_strategy=where, **options).remote())
        self._running: dict[Any, int] = {}

    def place(self) -> list[Place]:
        """Wait until all actors are there; return where they are."""
        import ray

        return ray.get([actor.place.remote(self._layout.accelerator) for actor in self._actors])

    def start(
        self,
        places: Sequence[Place],
        folder: str,
        environment: Mapping[str, str],
        log: Callable[[int], str],
        restarts: int,
        arguments: tuple[Callable[..., None], Any, Any],
    ) -> list[int]:
        """Begin to train on all ranks; returns their process ids.

        folder      working directory
        arguments   of `RankActor.run`; its board goes to rank 0 alone
        """
        import ray

        variables = rank_environments(places, self._layout, restarts)
        prepared = [
            actor.prepare.remote(folder, {**environment, **own}, log(number))
            for number, (actor, own) in enumerate(zip(self._actors, variables, strict=True))
        ]
        pids: list[int] = ray.get(prepared)
        entry, config, board = arguments
        for number, actor in enumerate(self._actors):
            self._running[actor.run.remote(entry, config, board if number == 0 else None)] = number
        return pids

    def ended(self, seconds: float) -> dict[int, Outcome | Lost]:
        """Return how ranks have ended since the last call; wait up to `seconds` for the first."""
        import ray

        done, _ = ray.wait(list(self._running), num_returns=1, timeout=seconds)
        return {self._running.pop(ref): self._outcome(ref) for ref in done}

    @property
    def is_running(self) -> bool:
        """Whether a rank has not ended yet."""
        return bool(self._running)

    def _outcome(self, ref: Any) -> Outcome | Lost:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return ray.get(ref)
        except RayActorError as error:
            return Lost(cause_of(error))
        except RayTaskError as error:
            return Outcome(ExitStatus.FAILED, str(error))

    def kill(self) -> None:
        """End all ranks at once, and wait until they are gone."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._running:
            ray.wait(list(self._running), num_returns=len(self._running), timeout=END_S)
        self._running = {}
