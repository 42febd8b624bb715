"""`DriverPool`: groups are sampled by driver processes of this machine, and their bodies come back in shared memory.

Each group has the seed of its number, so that the samples do not depend on which driver has it. The groups of a driver
that ends go to the others.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from moe_replay.errors import MoeReplayError
from moe_replay.rollout.pool_member import ServerState
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.drivers import worker
from moe_replay.train.drivers.channel import Channel, DriverError, Message, error_from_content
from moe_replay.train.drivers.group_wire import LayerSets, group_from_content, map_segment, task_to_content
from moe_replay.train.engines import StartedEngines
from moe_replay.train.groups import GroupTask, RunningGroup
from moe_replay.train.reward_pool.wire import RewardWireError
from moe_replay.train.reward_pool.worker import START
from moe_replay.train.sequences import ASK_S
from moe_replay.train.types import Group

logger = logging.getLogger(__name__)
T = TypeVar("T")
GRACE_S = 10.0
"""Seconds that a driver has to end by itself."""


class _Driver:
    """One driver process, and the groups that it has, by their id."""

    def __init__(self, number: int, count: int, setup: Mapping[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            given = {"path": sys.path, "socket": theirs.fileno(), "parent": os.getpid()}
            self.process = subprocess.Popen(
                [sys.executable, "-c", START.format(module=worker.__name__), json.dumps(given)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for rank 0, which ends its drivers in order
            )
        self.name = f"rollout driver {number + 1} of {count} (process {self.process.pid})"
        self.channel = Channel(ours)
        self.followed: Future[None] = Future()
        self.groups: dict[int, _Sent] = {}
        self.segment = memoryview(b"")
        self.timeouts = 0
        self.lost: MoeReplayError | None = None
        self.channel.send(setup)

    def ending(self) -> str:
        """Return how the process has ended."""
        try:
            status = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"

    def end(self, deadline: float) -> None:
        """Wait for the process to end until a moment, then kill it, and what it has left in its process group."""
        if self.process.returncode is not None:
            return
        while time.monotonic() < deadline and not self._has_ended():
            time.sleep(0.02)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _has_ended(self) -> bool:
        """Return whether the process has ended; its id stays taken until it is waited for."""
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True


class _Sent:
    """A group that a driver has: its task as it was sent, and who waits for it."""

    def __init__(self, number: int, content: dict[str, Any]) -> None:
        self.content = {**content, "id": number}
        self.running = RunningGroup(Future(), Future())


class DriverPool:
    """Driver processes, as the rollouts of rank 0 see them.

    setup        first message to each driver: settings, model, servers
    first_alike  groups that are submitted together have the first turns of the first one's parameters
    """

    def __init__(self, count: int, setup: Mapping[str, Any], layer_sets: LayerSets, *, first_alike: bool) -> None:
        self._layer_sets, self._first_alike = layer_sets, first_alike
        self._lock = threading.RLock()
        self._next_id = 0
        self._failure: MoeReplayError | None = None  # an error of a driver itself, not of a group
        self._closing = False
        self._drivers: list[_Driver] = []
        self._threads: list[threading.Thread] = []
        try:
            for number in range(count):
                self._drivers.append(_Driver(number, count, {**setup, "layer_sets": list(layer_sets)}))
        except OSError:
            self.close()
            raise
        for driver in self._drivers:
            thread = threading.Thread(target=self._read, args=(driver,), name=driver.name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def pids(self) -> list[int]:
        """Process ids of the drivers."""
        return [driver.process.pid for driver in self._drivers]

    @property
    def timeouts(self) -> int:
        """Samples so far whose reward took too long, or ended its process."""
        return sum(driver.timeouts for driver in self._drivers)

    # ---- groups -------------------------------------------------------------------------------------------------

    def submit(self, tasks: Sequence[GroupTask], *, together: bool) -> list[RunningGroup]:
        """Start groups, each on the driver that has the fewest."""
        alike = together and self._first_alike
        sent = [self._sent(replace(task, first=tasks[0].params) if alike else task) for task in tasks]
        self._hand_out(sent)
        return [one.running for one in sent]

    def _sent(self, task: GroupTask) -> _Sent:
        self._next_id += 1
        made = _Sent(self._next_id, task_to_content(task))
        made.running.group.add_done_callback(lambda group, number=self._next_id: self._forget(number, group))
        return made

    def _hand_out(self, sent: Sequence[_Sent]) -> None:
        shares: dict[int, list[dict[str, Any]]] = {}
        with self._lock:
            alive = [place for place, driver in enumerate(self._drivers) if driver.lost is None]
            for one in sent if alive else ():
                chosen = min(alive, key=lambda place: len(self._drivers[place].groups))
                self._drivers[chosen].groups[one.content["id"]] = one
                shares.setdefault(chosen, []).append(one.content)
        for one in () if alive else sent:
            _fail(one.running, self._loss())
        for place, contents in shares.items():
            self._send(self._drivers[place], {"groups": contents})

    def _loss(self) -> MoeReplayError:
        """Return why no driver is left."""
        return next((driver.lost for driver in self._drivers if driver.lost is not None), DriverError("no driver"))

    def _forget(self, number: int, group: Future[Group]) -> None:
        """Tell the driver of a group that was cancelled."""
        if not group.cancelled():
            return
        with self._lock:
            owners = [driver for driver in self._drivers if driver.groups.pop(number, None) is not None]
        for driver in owners if not self._closing else ():
            self._send(driver, {"cancel": [number]})

    def _send(self, driver: _Driver, content: Mapping[str, Any]) -> None:
        try:
            with suppress(OSError):  # it has ended, which its reader says
                driver.channel.send(content)
        except RewardWireError as error:
            raise DriverError(
                "a row of the data cannot be sent to a driver process",
                expected=error.expected,
                found=error.found,
                remedy="Store the column in another form, or set rollout.drivers = 1",
            ) from error

    def wait(self, future: Future[Any], give_up: Callable[[], bool] | None = None) -> bool:
        """Wait for a result; return False if `give_up`, asked every few seconds, says so."""
        while not wait([future], timeout=None if give_up is None else ASK_S).done:
            if give_up is not None and give_up():
                return False
        return True

    def result(self, future: Future[T]) -> T:
        """Wait for a result and return it."""
        return future.result()

    # ---- weights ------------------------------------------------------------------------------------------------

    def follow_update(self, version: int, weights_id: str) -> None:
        """Have all drivers hold requests back, and accept samples of this update; returns when they do."""
        alive = [driver for driver in self._drivers if driver.lost is None]
        for driver in alive:
            driver.followed = Future()
            self._send(driver, {"follow_update": [version, weights_id]})
        for driver in alive:
            while driver.lost is None and not wait([driver.followed], timeout=1.0).done:
                pass
        if self._failure is not None or all(driver.lost is not None for driver in self._drivers):
            raise self._failure or self._loss()

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        """Release all drivers, with the servers that have taken the update."""
        for driver in self._drivers:
            self._send(driver, {"follow_servers": states})

    # ---- what drivers say ---------------------------------------------------------------------------------------

    def _read(self, driver: _Driver) -> None:
        while (message := driver.channel.receive()) is not None:
            if "fatal" in message.content:
                self._lose(driver, error_from_content(message.content["fatal"], driver.name), for_good=True)
                return
            self._take(driver, message)
        if not self._closing:
            remedy = "Its last lines say why; without any, the machine may have run out of memory"
            self._lose(driver, DriverError(f"{driver.name} {driver.ending()}", remedy=remedy))

    def _take(self, driver: _Driver, message: Message) -> None:
        content = message.content
        if message.file >= 0:
            driver.segment = map_segment(message.file)
        elif "followed" in content:
            driver.followed.set_result(None)
        elif "sampled" in content:
            with self._lock:
                sent = driver.groups.get(content["sampled"])
            if sent is not None and not sent.running.sampled.done():
                sent.running.sampled.set_result(None)
        elif "done" in content:
            with self._lock:
                sent = driver.groups.pop(content["done"], None)
            if sent is None or not sent.running.group.set_running_or_notify_cancel():
                return
            if "error" in content:
                sent.running.group.set_exception(error_from_content(content["error"], driver.name))
            else:
                driver.timeouts = content["timeouts"]
                sent.running.group.set_result(group_from_content(content["group"], driver.segment, self._layer_sets))

    def _lose(self, driver: _Driver, error: MoeReplayError, *, for_good: bool = False) -> None:
        """Hand the groups of a driver that has ended to the others; `for_good`: they fail with its error."""
        with self._lock:
            driver.lost = error
            left, driver.groups = list(driver.groups.values()), {}
        if for_good:
            self._failure = error
            for one in left:
                _fail(one.running, error)
            return
        if any(other.lost is None for other in self._drivers):
            logger.warning("%s: its %d groups go to the others", error.problem, len(left))
        self._hand_out(left)

    # ---- end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all drivers and what they have started."""
        if self._closing:
            return
        self._closing = True
        for driver in self._drivers:
            with suppress(OSError):
                driver.channel.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + GRACE_S
        for driver in self._drivers:
            driver.end(deadline)
        for thread in self._threads:
            thread.join()
        for driver in self._drivers:
            driver.channel.close()


def _fail(running: RunningGroup, error: MoeReplayError) -> None:
    if running.group.set_running_or_notify_cancel():
        running.group.set_exception(error)
    if not running.sampled.done():
        running.sampled.set_result(None)


def open_drivers(
    config: TrainConfig, model: str, max_length: int, layer_sets: LayerSets, started: StartedEngines
) -> DriverPool:
    """Start the driver processes of a run.

    model        folder of the model
    max_length   tokens of a sequence at most
    layer_sets   that trajectories are encoded for (`TrajectoryStore.layer_sets`)
    started      the engines that the run has started, if it has
    """
    count = config.rollout.drivers
    workers = math.ceil(config.reward.workers / count)
    shared = config.model_copy(update={"reward": config.reward.model_copy(update={"workers": workers})})
    setup = {
        "config": shared.model_dump(mode="json"),
        "model": model,
        "max_length": max_length,
        "urls": list(started.urls),
        "token": started.token,
    }
    return DriverPool(count, setup, layer_sets, first_alike=config.rollout.environment is None)
