"""The program of a rollout worker: it samples from the run's servers, plays environments, scores, and encodes.

Weights, versions and the data stay with rank 0, which sends tasks and says when servers are updated.
"""

from __future__ import annotations

import math
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from moe_replay.engines.base import ServerState
from moe_replay.errors import MoeReplayError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.rollout.groups import Group, LocalGroups, RunningGroup
from moe_replay.train.rollout.reward_worker import error_to_content, open_connection
from moe_replay.train.rollout.rollouts import texts_of
from moe_replay.train.rollout.tools import load_tools
from moe_replay.train.setup.engines import StartedEngines, open_engine
from moe_replay.train.setup.inputs import load_rewards
from moe_replay.train.setup.sources import load_tokenizer
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.workers.wire import Channel, GroupWriter, task_from_content
from moe_replay.utils.processes import WATCH

CHECK_S = 1.0
"""Seconds between two looks at environments."""


def main(settings: str) -> None:
    _, connection = open_connection(settings)
    channel = Channel(connection)
    setup = channel.receive()
    if setup is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):  # rank 0 has ended
        try:
            with ExitStack() as resources:
                _Worker(channel, setup.content, resources).serve()
        except MoeReplayError as error:
            channel.send({"fatal": error_to_content(error)})


class _Worker:
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
        texts = (lambda trajectory: texts_of(trajectory, tokenizer)) if config.log.completions else None
        self._writer = GroupWriter(layer_sets, lambda file: channel.send({"segment": True}, file), texts)
        self._sending = ThreadPoolExecutor(1, "results")  # one at a time: groups are in the segment announced last
        resources.callback(self._sending.shutdown, wait=False, cancel_futures=True)
        self._channel = channel
        self._limit_s = rollout.environment_timeout_s if rollout.environment is not None else math.inf
        self._running: dict[int, RunningGroup] = {}
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Serve the requests of rank 0 until it closes the connection."""
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

    # ---- requests of rank 0 -----------------------------------------------------------------------------------

    def _on_groups(self, tasks: list[dict[str, Any]]) -> None:
        for content in tasks:
            group_id = content["id"]
            (running,) = self._groups.submit([task_from_content(content)], together=False)
            with self._lock:
                self._running[group_id] = running
            running.sampled.add_done_callback(
                lambda _, group_id=group_id: self._send_later(lambda: {"sampled": group_id})
            )
            running.group.add_done_callback(lambda group, group_id=group_id: self._finish(group_id, group))

    def _on_cancel(self, group_ids: list[int]) -> None:
        for group_id in group_ids:
            with self._lock:
                running = self._running.pop(group_id, None)
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

    def _finish(self, group_id: int, group: Future[Group]) -> None:
        with self._lock:
            running = self._running.pop(group_id, None)
        if refusals := self._engine.refusals:
            self._send_later(lambda: {"refusals": [[*server, count] for server, count in refusals.items()]})
        if running is not None and not group.cancelled():
            self._send_later(lambda: self._done(group_id, group))

    def _done(self, group_id: int, group: Future[Group]) -> dict[str, Any]:
        error = group.exception()
        if error is not None:
            return {"done": group_id, "error": error_to_content(error)}
        return {"done": group_id, "group": self._writer.write(group.result()), "timeouts": self._groups.timeouts}

    def _send_later(self, make: Callable[[], dict[str, Any]]) -> None:
        """Send a message in the order of these calls; one that cannot be made ends the worker."""
        with suppress(RuntimeError):  # closed
            self._sending.submit(lambda: self._channel.send(make())).add_done_callback(self._check_sent)

    def _check_sent(self, sent: Future[None]) -> None:
        error = None if sent.cancelled() else sent.exception()
        if error is not None:
            with suppress(OSError):  # rank 0 has closed
                self._channel.send({"fatal": error_to_content(error)})
