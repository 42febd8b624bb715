"""Rollout engines on Ray: the actor of one engine, and the driver's group of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from moe_replay.cluster.layout import Layout, actor_options
from moe_replay.cluster.ranks import death_cause, enter
from moe_replay.cluster.state_actor import EngineList, EngineRequest
from moe_replay.errors import MoeReplayError
from moe_replay.utils.misc import one_line

EXIT_POLL_S = 2.0
CLOSE_TIMEOUT_S = 45.0
LOST_DELAY_S = 10.0
"""Seconds before a lost actor is restarted: Ray needs that long to notice that its node is gone."""


# ---- in the engine actor's process -----------------------------------------------------------------------------------


class EngineReply(NamedTuple):
    """Result of a start: address and process of the engine, or the error that ended it."""

    url: str = ""
    pid: int = 0
    error: str = ""


class EngineActor:
    """One engine: starts the server that `moe-replay rollout` would start, and watches it.

    Ray runs actor methods in the main thread, one after the other; the engine ends with that thread.
    """

    def __init__(self) -> None:
        self._processes: Any = None

    def start(
        self, engine: str, fields: Mapping[str, Any], token: str, folder: str, environment: Mapping[str, str], log: str
    ) -> EngineReply:
        """Start the engine and wait until it is ready.

        fields        of its `StartRequest`
        folder        working directory of the driver
        environment   forwarded variables, and the engine's devices
        """
        import ray

        log_start = enter(folder, environment, Path(log))
        if os.getcwd() not in sys.path:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        from moe_replay.engines.base import StartRequest
        from moe_replay.engines.server.engine_processes import EngineProcesses

        address = ray.util.get_node_ip_address()
        try:
            self._processes = EngineProcesses(
                engine, StartRequest.from_fields(fields), 1, token=token, host=address, shares=[None]
            )
        except MoeReplayError as error:
            return EngineReply(error=f"{error}{_last_line(Path(log), log_start)}")
        (port,), (pid,) = self._processes.ports, self._processes.pids
        return EngineReply(f"http://{address}:{port}", pid)

    def wait(self, timeout_s: float) -> int | None:
        """Return the engine's exit status; None if it is still running after `timeout_s`."""
        return self._processes.wait(timeout_s)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


def _last_line(log: Path, start: int) -> str:
    """Return the last non-empty line written since offset `start`, in parentheses."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f" ({last.strip()[:500]})" if last else ""


# ---- in the driver ---------------------------------------------------------------------------------------------------


class EnginePlacement(NamedTuple):
    """Place of an engine: a bundle of a placement group, and the variables that name its devices there."""

    group: Any
    bundle: int
    environment: Mapping[str, str]


@dataclass
class _Slot:
    """One engine. `ref` is the pending actor call: `start` until `url` is set, then `wait`."""

    index: int
    placement: EnginePlacement
    actor: Any = None
    ref: Any = None
    url: str = ""
    started: float = 0.0
    restarts: int = 0
    not_before: float = 0.0


class EngineGroup:
    """Starts engines, restarts those that exit, and scales their number.

    layout      resources of the run; replaced when the trainer is placed again
    launch      arguments of `EngineActor.start` after the request: token, folder, environment
    log_path    returns an engine's log file by its index
    place       returns an engine's placement by its index
    log         called with every log line

    error       why no more engines will start; empty otherwise
    lost        how a colocated engine ended; it cannot be restarted alone, since the trainer now holds the devices'
                memory, so ranks and engines all restart
    """

    def __init__(
        self,
        layout: Layout,
        max_restarts: int,
        launch: tuple[str, str, Mapping[str, str]],
        log_path: Callable[[int], str],
        place: Callable[[int], EnginePlacement],
        log: Callable[[str], None],
    ) -> None:
        self.layout, self._max_restarts = layout, max_restarts
        self._launch, self._log_path, self._place, self._log = launch, log_path, place, log
        self._slots: list[_Slot] = []
        self._request: EngineRequest | None = None
        self._was_ready = False
        self._next_index = 0
        self._scalings, self._given_up = 0, 0  # engines given up since the number was set
        self._leaving: dict[Any, tuple[_Slot, float]] = {}
        self.error = self.lost = ""

    @property
    def engines(self) -> EngineList:
        urls = tuple(slot.url for slot in self._slots if slot.url)
        return EngineList(urls, sum(not slot.url for slot in self._slots), self.error)

    def reserve(self, count: int) -> list[Any]:
        """Reserve resources for the first engines; returns the placement groups to wait for.

        Before the trainer starts again: those of the engines that there are by now, more or fewer.
        """
        for _ in range(0 if self._next_index else count):
            self._add()
        return [slot.placement.group for slot in self._slots]

    def reconcile(self, request: EngineRequest | None, desired: int, scalings: int = 0) -> None:
        """Bring the engines closer to the desired number; call repeatedly. Starts nothing before there is a request.

        scalings   how often the number has been set: then engines that were given up are started again
        """
        if request is None or self.error or self.lost:
            return
        self._request = request
        if scalings != self._scalings:
            self._scalings, self._given_up = scalings, 0
        desired = self.layout.engines if self.layout.colocated else desired  # fixed by the trainer nodes
        desired -= self._given_up
        while len(self._slots) < desired:
            self._add()
            if self._was_ready:
                self._log(f"engine {self._slots[-1].index} joins: {len(self._slots)} of {desired} engines")
        while len(self._slots) > max(desired, 1):
            self._leave(self._slots.pop())
        for slot in list(self._slots):
            if slot.actor is None:
                if time.monotonic() >= slot.not_before:
                    self._start(slot)
            else:
                self._poll(slot)
        self._finish_leaving()
        self._was_ready = self._was_ready or (bool(self._slots) and all(slot.url for slot in self._slots))

    def reset(self) -> None:
        """Kill and forget all engines, before the trainer whose nodes they run on is placed again."""
        for slot in self._slots:
            self._kill(slot)
        self._slots, self._was_ready, self._next_index, self._given_up, self.lost = [], False, 0, 0, ""

    def close(self) -> None:
        """Shut all engines down; those that do not exit in time are killed."""
        import ray

        for slot in self._slots:
            self._leave(slot, is_logged=False)
        self._slots = []
        if self._leaving:
            ray.wait(list(self._leaving), num_returns=len(self._leaving), timeout=CLOSE_TIMEOUT_S)
        for slot, _ in self._leaving.values():
            self._kill(slot)
        self._leaving = {}

    # ---- one engine ---------------------------------------------------------------------------------------------

    def _add(self) -> None:
        self._slots.append(_Slot(self._next_index, self._place(self._next_index)))
        self._next_index += 1

    def _start(self, slot: _Slot) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._request is not None
        group, bundle, device_variables = slot.placement
        remote: Any = ray.remote(EngineActor)
        slot.actor = remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            **actor_options(self.layout.engine),
        ).remote()
        token, folder, environment = self._launch
        slot.ref = slot.actor.start.remote(
            *self._request, token, folder, {**environment, **device_variables}, self._log_path(slot.index)
        )
        slot.url, slot.started = "", time.monotonic()

    def _poll(self, slot: _Slot) -> None:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if not ray.wait([slot.ref], timeout=0)[0]:
            return
        try:
            result: EngineReply | int | None = ray.get(slot.ref)
        except RayActorError as error:
            slot.not_before = time.monotonic() + LOST_DELAY_S
            self._ended(slot, f"was lost ({death_cause(error)})")
            return
        except RayTaskError as error:
            self._ended(slot, f"failed: {one_line(error)}", starting=not slot.url)
            return
        if isinstance(result, EngineReply) and result.error:
            self._ended(slot, f"did not start: {result.error}", starting=True)
            return
        if isinstance(result, EngineReply):
            slot.url = result.url
            took = time.monotonic() - slot.started
            self._log(f"engine {slot.index}: ready at {slot.url} after {took:.0f} s, process {result.pid}")
        elif result is not None:
            self._ended(slot, f"exited with status {result}")
            return
        slot.ref = slot.actor.wait.remote(EXIT_POLL_S)

    def _ended(self, slot: _Slot, reason: str, *, starting: bool = False) -> None:
        log = f"; log: {self._log_path(slot.index)}"
        self._kill(slot)
        slot.actor, slot.url, slot.restarts = None, "", slot.restarts + 1
        if starting and not self._was_ready:  # a second attempt would fail in the same way
            self.error = f"engine {slot.index} {reason}{log}"
        elif self.layout.colocated and self._was_ready:
            self.lost = f"colocated engine {slot.index} {reason}"
        elif slot.restarts <= self._max_restarts:
            self._log(f"engine {slot.index} {reason}; restarting ({slot.restarts} of {self._max_restarts})")
        else:
            self._slots.remove(slot)
            self._free(slot)
            self._given_up += 1
            self._log(f"engine {slot.index} {reason}; giving up after {self._max_restarts} restarts{log}")
            if not self._slots:
                self.error = f"no engine left; engine {slot.index} {reason}{log}"

    def _kill(self, slot: _Slot) -> None:
        import ray

        if slot.actor is not None:
            ray.kill(slot.actor)

    # ---- scaling down -------------------------------------------------------------------------------------------

    def _leave(self, slot: _Slot, *, is_logged: bool = True) -> None:
        if slot.actor is not None:
            self._leaving[slot.actor.close.remote()] = slot, time.monotonic() + CLOSE_TIMEOUT_S
        else:
            self._free(slot)
        if is_logged:
            self._log(f"engine {slot.index} leaves")

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
            remove_placement_group(slot.placement.group)
