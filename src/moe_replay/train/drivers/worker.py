"""The program of a driver process: it samples from the run's servers, plays environments, scores, and encodes.

Weights, versions and the data stay with rank 0, which sends tasks and says when servers are updated.
"""

from __future__ import annotations

import json
import math
import select
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.rollout.pool_member import ServerState
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.drivers.channel import Channel, error_to_content
from moe_replay.train.drivers.group_wire import GroupWriter, task_from_content
from moe_replay.train.engines import StartedEngines, open_engine
from moe_replay.train.groups import LocalGroups, RunningGroup
from moe_replay.train.inputs import load_rewards
from moe_replay.train.rollouts import texts_of
from moe_replay.train.sources import load_tokenizer
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.tools import load_tools
from moe_replay.train.types import Group
from moe_replay.utils.hang_watch import WATCH
from moe_replay.utils.processes import end_with_parent

CHECK_S = 1.0
"""Seconds between two looks at environments."""


def main(settings: str) -> None:
    """Serve rank 0; `settings` is JSON with the socket and the parent's process id."""
    given = json.loads(settings)
    end_with_parent(given["parent"])
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(line_buffering=True)  # type: ignore[union-attr]  what it prints before it is killed
    connection = socket.socket(fileno=given["socket"])
    connection.set_inheritable(False)
    channel = Channel(connection)
    setup = channel.receive()
    if setup is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):  # rank 0 has ended
        try:
            with ExitStack() as resources:
                _Driver(channel, setup.content, resources).serve()
        except MoeReplayError as error:
            channel.send({"fatal": error_to_content(error)})


class _Driver:
    """Groups in flight, by the id that rank 0 has given them."""

    def __init__(self, channel: Channel, setup: dict[str, Any], resources: ExitStack) -> None:
        config = TrainConfig.model_validate(setup["config"])
        self._urls: list[str] = setup["urls"]
        started = StartedEngines(tuple(self._urls), setup["token"], (lambda: self._urls) if self._urls else None)
        folder, rollout = setup["model"], config.rollout
        opened = open_engine(config, folder, started)
        resources.callback(opened.close)
        self._engine = SyncedEngine(opened)
        tokenizer = load_tokenizer(folder, trust_remote_code=config.model.trust_remote_code)
        tools = load_tools(rollout.tools, rollout.tool_format, rollout.tool_timeout_s)
        rewards = load_rewards(config)
        self._groups = LocalGroups(config, self._engine, tokenizer, rewards, setup["max_length"], tools)
        resources.callback(self._groups.close)
        layer_sets = [None if layers is None else tuple(layers) for layers in setup["layer_sets"]]
        texts = (lambda one: texts_of(one, tokenizer)) if config.log.completions else None
        self._writer = GroupWriter(layer_sets, lambda file: channel.send({"segment": True}, file), texts)
        self._sending = ThreadPoolExecutor(1, "results")  # one at a time: groups are in the segment announced last
        resources.callback(self._sending.shutdown, wait=False, cancel_futures=True)
        self._channel = channel
        self._limit_s = rollout.environment_timeout_s if rollout.environment is not None else math.inf
        self._running: dict[int, RunningGroup] = {}
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Do what rank 0 asks for until it closes the connection."""
        while True:
            with WATCH.waiting(self._limit_s):
                readable, _, _ = select.select([self._channel.connection], [], [], CHECK_S)
            self._groups.check_environments()
            if not readable:
                continue
            message = self._channel.receive()
            if message is None:
                return
            for name, value in message.content.items():
                getattr(self, f"_on_{name}")(value)

    # ---- what rank 0 asks for -----------------------------------------------------------------------------------

    def _on_groups(self, tasks: list[dict[str, Any]]) -> None:
        for content in tasks:
            number = content["id"]
            (running,) = self._groups.submit([task_from_content(content)], together=False)
            with self._lock:
                self._running[number] = running
            running.sampled.add_done_callback(lambda _, number=number: self._send_later(lambda: {"sampled": number}))
            running.group.add_done_callback(lambda group, number=number: self._finish(number, group))

    def _on_cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            with self._lock:
                running = self._running.pop(number, None)
            if running is not None:
                running.group.cancel()

    def _on_follow_update(self, update: list[Any]) -> None:
        version, weights_id = update
        self._engine.follow_update(version, weights_id)
        self._channel.send({"followed": True})

    def _on_follow_servers(self, states: dict[str, list[Any]]) -> None:
        self._urls = list(states)  # some may have joined or left
        self._engine.follow_servers({url: ServerState(*state) for url, state in states.items()})

    # ---- results ------------------------------------------------------------------------------------------------

    def _finish(self, number: int, group: Future[Group]) -> None:
        with self._lock:
            known = self._running.pop(number, None)
        if known is not None and not group.cancelled():
            self._send_later(lambda: self._done(number, group))

    def _done(self, number: int, group: Future[Group]) -> dict[str, Any]:
        error = group.exception()
        if error is not None:
            return {"done": number, "error": error_to_content(error)}
        return {"done": number, "group": self._writer.write(group.result()), "timeouts": self._groups.timeouts}

    def _send_later(self, make: Callable[[], dict[str, Any]]) -> None:
        """Send a message in the order of these calls; one that cannot be made ends the driver."""
        with suppress(RuntimeError):  # closed
            self._sending.submit(lambda: self._channel.send(make())).add_done_callback(self._check_sent)

    def _check_sent(self, sent: Future[None]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if error is not None:
            with suppress(OSError):  # rank 0 has closed
                self._channel.send({"fatal": error_to_content(error)})
