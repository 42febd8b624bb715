"""A process that scores samples for the trainer: it imports the reward functions itself, and ends with its parent.

It reads requests from a socket and answers them in turn, until it is killed or the socket is closed. What a function
prints goes where the trainer prints.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from io import BufferedRWPair
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.train.reward_pool.wire import LENGTH, from_content, to_frame
from moe_replay.train.rewards import Reward, RewardError, call, call_details, checked, load_reward, prepare
from moe_replay.utils.messages import one_line
from moe_replay.utils.plugins import user_code
from moe_replay.utils.processes import end_with_parent

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; from {module} import main; main(sys.argv[1])"
"""Program of the process: modules are found where the trainer finds them."""


def main(settings: str) -> None:
    """Serve requests; `settings` is JSON with the socket, the parent's process id and the names of the rewards."""
    given = json.loads(settings)
    end_with_parent(given["parent"])
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(line_buffering=True)  # type: ignore[union-attr]  what it prints before it is killed
    with socket.socket(fileno=given["socket"]) as connection, connection.makefile("rwb") as stream:
        connection.set_inheritable(False)
        try:
            rewards = {name: load_reward(name) for name in given["rewards"]}
            for reward in rewards.values():
                prepare(reward)
        except MoeReplayError as error:
            _send(stream, _as_message(error))
            return
        _send(stream, {"ready": True})
        while (length := stream.read(LENGTH.size)) and len(length) == LENGTH.size:
            request = from_content(stream.read(LENGTH.unpack(length)[0]))
            for answer in _answers(rewards[request["reward"]], request):
                _send(stream, answer)


def _answers(reward: Reward, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the values of all samples at once, or of one sample after the other (`each`); an error is the last."""
    prompts, completions, columns = request["prompts"], request["completions"], request["columns"]
    size = 1 if request["each"] else len(completions)
    for start in range(0, len(completions), size):
        part = slice(start, start + size)
        part_columns = {name: values[part] for name, values in columns.items()}
        try:
            yield {"values": _values(reward, prompts[part], completions[part], part_columns)}
        except MoeReplayError as error:
            yield _as_message(error)
            return


def _values(reward: Reward, prompts: list[Any], completions: list[Any], columns: dict[str, Any]) -> list[float | None]:
    with user_code(f"reward {reward.name!r}", RewardError, **call_details(completions, columns)):
        try:
            values = call(reward, prompts, completions, columns)
        except KeyboardInterrupt as error:  # its own: signals of the terminal do not reach this process
            raise RewardError(
                f"reward {reward.name!r} raised KeyboardInterrupt: {one_line(error)}",
                **call_details(completions, columns),
            ) from error
    return checked(reward, values, len(completions))


def _as_message(error: MoeReplayError) -> dict[str, Any]:
    parts = {name: getattr(error, name) for name in ("problem", "sample", "expected", "found", "remedy")}
    cause = error.__cause__
    return {
        "error": {name: None if part is None else str(part) for name, part in parts.items()},
        "traceback": "".join(traceback.format_exception(cause)) if cause is not None else "",
    }


def _send(stream: BufferedRWPair, message: Mapping[str, Any]) -> None:
    stream.write(to_frame(message))
    stream.flush()
