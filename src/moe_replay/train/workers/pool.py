"""`WorkerPool`: groups are sampled by worker processes of this machine, and their bodies come back in shared memory.

A group comes with its seed, so that samples do not depend on which worker has it. The groups of a worker
that ends go to the others.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, NamedTuple

from moe_replay.engines.base import Refusals, ServerState
from moe_replay.errors import MoeReplayError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.rollout.groups import STOP_CHECK_S, Group, GroupTask, RunningGroup, ShouldStop
from moe_replay.train.rollout.reward_worker import RewardWireError, start_process
from moe_replay.train.setup.engines import StartedEngines
from moe_replay.train.workers import worker as worker_program
from moe_replay.train.workers.wire import (
    Channel,
    LayerSets,
    Message,
    WorkerError,
    error_from_content,
    group_from_content,
    map_segment,
    task_to_content,
)
from moe_replay.utils.misc import one_line

logger = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 10.0
"""Seconds that a worker has to end by itself."""


class _Worker:
    """One worker process, and the groups that it has, by their id."""

    def __init__(self, index: int, count: int, setup: Mapping[str, Any]) -> None:
        # In its own process group: Ctrl-C is for rank 0, which ends its workers in order.
        self.process, connection = start_process(worker_program.__name__)
        self.name = f"rollout worker {index + 1} of {count} (process {self.process.pid})"
        self.channel = Channel(connection)
        self.followed: Future[None] = Future()
        self.groups: dict[int, _Sent] = {}
        self.segment = memoryview(b"")
        self.timeouts = 0
        self.refusals: Refusals = {}
        self.lost: MoeReplayError | None = None
        self.channel.send(setup)

    def ending(self) -> str:
        try:
            status = self.process.wait(SHUTDOWN_TIMEOUT_S)
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


class _Sent(NamedTuple):
    """A group that a worker has: its task as it was sent, and who waits for it."""

    content: dict[str, Any]
    running: RunningGroup


class WorkerPool:
    """Worker processes, as the rollouts of rank 0 see them.

    setup   first message to each worker: settings, model, servers
    """

    def __init__(self, count: int, setup: Mapping[str, Any], layer_sets: LayerSets) -> None:
        self._layer_sets = layer_sets
        self._lock = threading.RLock()
        self._next_id = 0
        self._failure: MoeReplayError | None = None  # an error of a worker itself, not of a group
        self._closing = False
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        try:
            for index in range(count):
                self._workers.append(_Worker(index, count, {**setup, "layer_sets": list(layer_sets)}))
        except OSError:
            self.close()
            raise
        for worker in self._workers:
            thread = threading.Thread(target=self._read, args=(worker,), name=worker.name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    @property
    def timeouts(self) -> int:
        return sum(worker.timeouts for worker in self._workers)

    @property
    def refusals(self) -> Refusals:
        return sum((Counter(worker.refusals) for worker in self._workers), Counter())

    # ---- groups -------------------------------------------------------------------------------------------------

    def submit(self, tasks: Sequence[GroupTask], *, together: bool) -> list[RunningGroup]:
        """Start groups, each on the worker that has the fewest."""
        sent = [self._sent(task) for task in tasks]
        self._hand_out(sent)
        return [group.running for group in sent]

    def _sent(self, task: GroupTask) -> _Sent:
        self._next_id += 1
        running = RunningGroup(Future(), Future())
        running.group.add_done_callback(lambda group, group_id=self._next_id: self._forget(group_id, group))
        return _Sent({**task_to_content(task), "id": self._next_id}, running)

    def _hand_out(self, sent: Sequence[_Sent]) -> None:
        shares: dict[int, list[dict[str, Any]]] = {}
        with self._lock:
            alive = [index for index, worker in enumerate(self._workers) if worker.lost is None]
            for group in sent if alive else ():
                least_busy = min(alive, key=lambda index: len(self._workers[index].groups))
                self._workers[least_busy].groups[group.content["id"]] = group
                shares.setdefault(least_busy, []).append(group.content)
        for group in () if alive else sent:
            _fail(group.running, self._loss())
        for index, contents in shares.items():
            self._send(self._workers[index], {"groups": contents})

    def _loss(self) -> MoeReplayError:
        """Return why no worker is left."""
        return next((worker.lost for worker in self._workers if worker.lost is not None), WorkerError("no worker"))

    def _forget(self, group_id: int, group: Future[Group]) -> None:
        """Tell the worker of a group that was cancelled."""
        if not group.cancelled():
            return
        with self._lock:
            owners = [worker for worker in self._workers if worker.groups.pop(group_id, None) is not None]
        for worker in owners if not self._closing else ():
            self._send(worker, {"cancel": [group_id]})

    def _send(self, worker: _Worker, content: Mapping[str, Any]) -> None:
        try:
            with suppress(OSError):  # it has ended, which its reader says
                worker.channel.send(content)
        except RewardWireError as error:
            raise WorkerError(
                "a row of the data cannot be sent to a worker process",
                expected=error.expected,
                found=error.found,
                remedy="Store the column in another form, or set rollout.workers = 1",
            ) from error

    def wait(self, future: Future[Any], should_stop: ShouldStop | None = None) -> bool:
        """Wait for a result; return False if `should_stop`, called every few seconds, returns True."""
        while not wait([future], timeout=None if should_stop is None else STOP_CHECK_S).done:
            if should_stop is not None and should_stop():
                return False
        return True

    # ---- weights ------------------------------------------------------------------------------------------------

    def follow_update(self, version: int, weights_id: str) -> None:
        """Have all workers hold requests back, and accept samples of this update; returns when they do."""
        alive = [worker for worker in self._workers if worker.lost is None]
        for worker in alive:
            worker.followed = Future()
            self._send(worker, {"follow_update": [version, weights_id]})
        for worker in alive:
            while worker.lost is None and not wait([worker.followed], timeout=1.0).done:
                pass
        if self._failure is not None or all(worker.lost is not None for worker in self._workers):
            raise self._failure or self._loss()

    def follow_servers(self, states: Mapping[str, ServerState]) -> None:
        """Release all workers, with the servers that have taken the update."""
        for worker in self._workers:
            self._send(worker, {"follow_servers": states})

    # ---- messages from workers ---------------------------------------------------------------------------------------

    def _read(self, worker: _Worker) -> None:
        try:
            while (message := worker.channel.receive()) is not None:
                if "fatal" in message.content:
                    self._lose(worker, error_from_content(message.content["fatal"], worker.name), for_good=True)
                    return
                self._take(worker, message)
        except OSError as error:  # this process can have no more descriptors, or no more memory
            problem = f"samples of {worker.name} cannot be received: {one_line(error)}"
            remedy = "Raise the limits of open files (ulimit -n) and of memory"
            self._lose(worker, WorkerError(problem, remedy=remedy), for_good=True)
            return
        if not self._closing:
            remedy = "Its last lines say why; without any, the machine may have run out of memory"
            self._lose(worker, WorkerError(f"{worker.name} {worker.ending()}", remedy=remedy))

    def _take(self, worker: _Worker, message: Message) -> None:
        content = message.content
        if message.file >= 0:
            worker.segment = map_segment(message.file)
        elif "followed" in content:
            worker.followed.set_result(None)
        elif "sampled" in content:
            with self._lock:
                sent = worker.groups.get(content["sampled"])
            if sent is not None and not sent.running.sampled.done():
                sent.running.sampled.set_result(None)
        elif "refusals" in content:
            worker.refusals = {(url, reason): count for url, reason, count in content["refusals"]}
        elif "done" in content:
            with self._lock:
                sent = worker.groups.pop(content["done"], None)
            if sent is None or not sent.running.group.set_running_or_notify_cancel():
                return
            if "error" in content:
                sent.running.group.set_exception(error_from_content(content["error"], worker.name))
            else:
                worker.timeouts = content["timeouts"]
                sent.running.group.set_result(group_from_content(content["group"], worker.segment, self._layer_sets))

    def _lose(self, worker: _Worker, error: MoeReplayError, *, for_good: bool = False) -> None:
        """Hand the groups of a worker that has ended to the others; `for_good`: they fail with its error."""
        with self._lock:
            worker.lost = error
            left, worker.groups = list(worker.groups.values()), {}
        if for_good:
            self._failure = error
            for group in left:
                _fail(group.running, error)
            return
        if any(remaining.lost is None for remaining in self._workers):
            logger.warning("%s: reassigning its %d groups", error.problem, len(left))
        self._hand_out(left)

    # ---- end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all workers and what they have started."""
        if self._closing:
            return
        self._closing = True
        for worker in self._workers:
            with suppress(OSError):
                worker.channel.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        for worker in self._workers:
            worker.end(deadline)
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.channel.connection.close()


def _fail(running: RunningGroup, error: MoeReplayError) -> None:
    if running.group.set_running_or_notify_cancel():
        running.group.set_exception(error)
    if not running.sampled.done():
        running.sampled.set_result(None)


def open_workers(
    config: TrainConfig, model: str, max_length: int, layer_sets: LayerSets, started: StartedEngines
) -> WorkerPool:
    """Start the worker processes of a run.

    model        folder of the model
    max_length   tokens of a sequence at most
    layer_sets   that trajectories are encoded for (`TrajectoryStore.layer_sets`)
    started      the engines that the run has started, if it has
    """
    count = config.rollout.workers
    reward_workers = math.ceil(config.reward.workers / count)
    shared = config.model_copy(update={"reward": config.reward.model_copy(update={"workers": reward_workers})})
    setup = {
        "config": shared.model_dump(mode="json"),
        "model": model,
        "max_length": max_length,
        "urls": list(started.urls),
        "token": started.token,
    }
    return WorkerPool(count, setup, layer_sets)
