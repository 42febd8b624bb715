"""The engines of a run, as the driver sees them: one actor each, started again when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_replay.cluster.board import EngineList, EngineOrder
from moe_replay.cluster.engine_actor import EngineActor, StartedEngine
from moe_replay.cluster.layout import Layout
from moe_replay.cluster.trainer_group import cause_of
from moe_replay.utils.messages import one_line

LOOK_S = 2.0
CLOSE_S = 45.0
LOST_S = 10.0
"""Seconds before an actor that was lost is started again: Ray notices only then that its machine is gone, if it is."""


class Spot(NamedTuple):
    """Placement of an engine: a bundle of a placement group, and variables that name its devices there."""

    group: Any
    bundle: int
    environment: Mapping[str, str]


@dataclass
class _Slot:
    """One engine. `ref` is what its actor is doing: starting until `url` is known, then watching."""

    number: int
    spot: Spot
    actor: Any = None
    ref: Any = None
    url: str = ""
    began: float = 0.0
    restarts: int = 0
    not_before: float = 0.0


class EngineGroup:
    """Starts engines, starts those again that end, and lets others join and leave.

    layout      resources of the run; replaced when the trainer is placed anew
    launch      arguments of `EngineActor.start` after the order: token, folder, environment
    log         returns the log file of an engine by its number
    spot        returns where an engine by its number runs
    tell        called with each line of what happens

    error       why there will be no more engines; empty: there will
    lost        what has happened to an engine that cannot be started again beside the trainer, since its memory is that
                of the trainer's devices: all of it starts again
    """

    def __init__(
        self,
        layout: Layout,
        max_restarts: int,
        launch: tuple[str, str, Mapping[str, str]],
        log: Callable[[int], str],
        spot: Callable[[int], Spot],
        tell: Callable[[str], None],
    ) -> None:
        self.layout, self._max_restarts = layout, max_restarts
        self._launch, self._log, self._spot, self._tell = launch, log, spot, tell
        self._slots: list[_Slot] = []
        self._order: EngineOrder | None = None
        self._was_ready = False
        self._next = 0
        self._leaving: dict[Any, tuple[_Slot, float]] = {}
        self.error = self.lost = ""

    @property
    def engines(self) -> EngineList:
        """The engines that can be used now."""
        urls = tuple(slot.url for slot in self._slots if slot.url)
        return EngineList(urls, sum(not slot.url for slot in self._slots), self.error)

    def reserve(self, count: int) -> list[Any]:
        """Reserve the resources of the first engines; returns the placement groups to wait for."""
        while len(self._slots) < count:
            self._add()
        return [slot.spot.group for slot in self._slots]

    def tend(self, order: EngineOrder | None, wanted: int) -> None:
        """Look after the engines; called again and again. Nothing is started before there is an order."""
        if order is None or self.error or self.lost:
            return
        self._order = order
        wanted = self.layout.engines if self.layout.colocated else wanted  # as many as the trainer's machines hold
        while len(self._slots) < wanted:
            self._add()
            if self._was_ready:
                self._tell(f"engine {self._slots[-1].number} joins: {len(self._slots)} of {wanted} engines")
        while len(self._slots) > max(wanted, 1):
            self._leave(self._slots.pop())
        for slot in list(self._slots):
            if slot.actor is None:
                if time.monotonic() >= slot.not_before:
                    self._start(slot)
            else:
                self._look_at(slot)
        self._finish_leaving()
        self._was_ready = self._was_ready or (bool(self._slots) and all(slot.url for slot in self._slots))

    def reset(self) -> None:
        """End all engines and forget them: their machines belong to a trainer that is placed anew."""
        for slot in self._slots:
            self._kill(slot)
        self._slots, self._was_ready, self._next, self.lost = [], False, 0, ""

    def close(self) -> None:
        """End all engines in order."""
        import ray

        for slot in self._slots:
            self._leave(slot, told=False)
        self._slots = []
        if self._leaving:
            ray.wait(list(self._leaving), num_returns=len(self._leaving), timeout=CLOSE_S)
        for slot, _ in self._leaving.values():
            self._kill(slot)
        self._leaving = {}

    # ---- one engine ---------------------------------------------------------------------------------------------

    def _add(self) -> None:
        self._slots.append(_Slot(self._next, self._spot(self._next)))
        self._next += 1

    def _start(self, slot: _Slot) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._order is not None
        resources = dict(self.layout.engine)
        where = PlacementGroupSchedulingStrategy(slot.spot.group, placement_group_bundle_index=slot.spot.bundle)
        remote: Any = ray.remote(EngineActor)
        slot.actor = remote.options(
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=where,
            max_restarts=0,
        ).remote()
        token, folder, environment = self._launch
        slot.ref = slot.actor.start.remote(
            *self._order, token, folder, {**environment, **slot.spot.environment}, self._log(slot.number)
        )
        slot.url, slot.began = "", time.monotonic()

    def _look_at(self, slot: _Slot) -> None:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if not ray.wait([slot.ref], timeout=0)[0]:
            return
        try:
            found: StartedEngine | int | None = ray.get(slot.ref)
        except RayActorError as error:
            slot.not_before = time.monotonic() + LOST_S
            self._ended(slot, f"was lost ({cause_of(error)})")
            return
        except RayTaskError as error:
            self._ended(slot, f"failed: {one_line(error)}", starting=not slot.url)
            return
        if isinstance(found, StartedEngine) and found.error:
            self._ended(slot, f"did not start: {found.error}", starting=True)
            return
        if isinstance(found, StartedEngine):
            slot.url = found.url
            took = time.monotonic() - slot.began
            self._tell(f"engine {slot.number}: ready at {slot.url} after {took:.0f} s, process {found.pid}")
        elif found is not None:
            self._ended(slot, f"ended with status {found}")
            return
        slot.ref = slot.actor.wait.remote(LOOK_S)

    def _ended(self, slot: _Slot, why: str, *, starting: bool = False) -> None:
        log = f"; log: {self._log(slot.number)}"
        self._kill(slot)
        slot.actor, slot.url, slot.restarts = None, "", slot.restarts + 1
        if starting and not self._was_ready:  # what the first start cannot do, another one cannot either
            self.error = f"engine {slot.number} {why}{log}"
        elif self.layout.colocated and self._was_ready:
            self.lost = f"engine {slot.number} on the trainer's devices {why}"
        elif slot.restarts <= self._max_restarts:
            self._tell(f"engine {slot.number} {why}: it is started again ({slot.restarts} of {self._max_restarts})")
        else:
            self._slots.remove(slot)
            self._tell(f"engine {slot.number} {why}: it is given up after {self._max_restarts} restarts{log}")
            if not self._slots:
                self.error = f"no engine is left; engine {slot.number} {why}{log}"

    def _kill(self, slot: _Slot) -> None:
        import ray

        if slot.actor is not None:
            ray.kill(slot.actor)

    # ---- leaving ------------------------------------------------------------------------------------------------

    def _leave(self, slot: _Slot, *, told: bool = True) -> None:
        if slot.actor is not None:
            self._leaving[slot.actor.close.remote()] = slot, time.monotonic() + CLOSE_S
        else:
            self._free(slot)
        if told:
            self._tell(f"engine {slot.number} leaves")

    def _finish_leaving(self) -> None:
        import ray

        done = ray.wait(list(self._leaving), num_returns=len(self._leaving), timeout=0)[0] if self._leaving else []
        late = [ref for ref, (_, deadline) in self._leaving.items() if time.monotonic() > deadline]
        for ref in {*done, *late}:
            slot, _ = self._leaving.pop(ref)
            self._kill(slot)
            self._free(slot)

    def _free(self, slot: _Slot) -> None:
        from ray.util import remove_placement_group

        if not self.layout.colocated:
            remove_placement_group(slot.spot.group)
