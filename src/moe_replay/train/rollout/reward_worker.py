"""A process that scores samples for the trainer: it imports the reward functions itself, and ends with its parent.

Messages are JSON, with a tag for values that JSON does not have; nothing is pickled. A message is its length in 8 bytes
and then the text; values that have no form here are refused. Requests are answered in order until the process is
killed or the socket is closed. The output of a function goes where the trainer's goes.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from io import BufferedRWPair
from typing import Any

import numpy as np

from moe_replay.errors import MoeReplayError
from moe_replay.train.rollout.rewards import Reward, RewardError, call, call_details, checked, load_reward, prepare
from moe_replay.utils.misc import one_line
from moe_replay.utils.plugins import user_code
from moe_replay.utils.processes import end_with_parent

LENGTH = struct.Struct("<Q")
_TAG = "\0moe-replay"


class RewardWireError(MoeReplayError):
    """A value that cannot be sent to a reward process."""


class TokenIds:
    """Token ids of a sample on their way: sent as an array, received as a list of int."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def tolist(self) -> list[int]:
        """Return them as a reward function gets them."""
        return self.ids.tolist()


def to_frame(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes, its length first."""
    try:
        content = json.dumps(message, default=_tagged, separators=(",", ":")).encode()
    except (TypeError, RecursionError) as error:
        raise _refused(one_line(error)) from error
    return LENGTH.pack(len(content)) + content


def from_content(content: bytes) -> dict[str, Any]:
    """Return the message of a frame, without its length."""
    return json.loads(content, object_hook=_untagged)


def _tagged(value: Any) -> Any:
    if isinstance(value, TokenIds):
        return {_TAG: "tokens", "value": _text(np.asarray(value.ids, "<i8").tobytes())}
    if isinstance(value, (bytes, bytearray)):
        return {_TAG: "bytes", "value": _text(bytes(value))}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        array = {"dtype": value.dtype.str, "shape": value.shape}
        return {_TAG: "array", "value": _text(np.ascontiguousarray(value).tobytes()), **array}
    if isinstance(value, np.ndarray):
        return {_TAG: "objects", "value": value.tolist()}
    if isinstance(value, timedelta):
        return {_TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
    for kind, name in ((datetime, "datetime"), (date, "date"), (time, "time")):  # a datetime is a date
        if isinstance(value, kind):
            return {_TAG: name, "value": value.isoformat()}
    if isinstance(value, Decimal):
        return {_TAG: "decimal", "value": str(value)}
    if isinstance(value, (set, frozenset)):
        return {_TAG: "set", "value": list(value)}
    raise _refused(type(value).__qualname__)


def _refused(cause: str) -> RewardWireError:
    return RewardWireError(
        "a value cannot be sent to a reward process",
        expected="what JSON has, bytes, dates, decimals, sets or numpy arrays",
        found=cause,
        remedy="Store the column in another form, or set reward.workers = 0",
    )


_READERS: dict[str, Callable[[Any], Any]] = {
    "tokens": lambda text: np.frombuffer(base64.b64decode(text), "<i8").tolist(),
    "bytes": base64.b64decode,
    "objects": lambda items: np.array(items, object),
    "timedelta": lambda parts: timedelta(*parts),
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "decimal": Decimal,
    "set": set,
}
"""Tag -> value of what `_tagged` makes of it; an array has a dtype and a shape as well."""


def _untagged(content: dict[str, Any]) -> Any:
    if _TAG not in content:
        return content
    kind, value = content[_TAG], content.get("value", "")
    if kind == "array":
        return np.frombuffer(base64.b64decode(value), content["dtype"]).reshape(content["shape"]).copy()
    if not isinstance(kind, str) or kind not in _READERS:
        raise RewardWireError("a message of a reward has an unknown tag", found=kind)
    return _READERS[kind](value)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


# ---- the process -----------------------------------------------------------------------------------------------------


_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; from {module} import main; main(sys.argv[1])"
"""Program of the process: modules are found where the trainer finds them."""


def start_process(module: str, **settings: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `main` of a module in a process with its own process group; return that and the socket to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        setup = {"path": sys.path, "socket": theirs.fileno(), "parent": os.getpid(), **settings}
        process = subprocess.Popen(
            [sys.executable, "-c", _START.format(module=module), json.dumps(setup)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    return process, ours


def open_connection(settings: str) -> tuple[dict[str, Any], socket.socket]:
    """Return the settings of this process, which ends with its parent, and the socket to it; `main` begins with it."""
    setup = json.loads(settings)
    end_with_parent(setup["parent"])
    for output in (sys.stdout, sys.stderr):
        output.reconfigure(line_buffering=True)  # type: ignore[union-attr]  what it prints before it is killed
    connection = socket.socket(fileno=setup["socket"])
    connection.set_inheritable(False)
    return setup, connection


def main(settings: str) -> None:
    """Serve requests for the rewards that the settings name."""
    setup, connection = open_connection(settings)
    with connection, connection.makefile("rwb") as stream:
        try:
            rewards = {name: load_reward(name) for name in setup["rewards"]}
            for reward in rewards.values():
                prepare(reward)
        except MoeReplayError as error:
            _send(stream, {"error": error_to_content(error)})
            return
        _send(stream, {"ready": True})
        while (length := stream.read(LENGTH.size)) and len(length) == LENGTH.size:
            request = from_content(stream.read(LENGTH.unpack(length)[0]))
            for answer in _answers(rewards[request["reward"]], request):
                _send(stream, answer)


def _answers(reward: Reward, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the values of all samples together, or sample by sample (`each`); an error is the last."""
    prompts, completions, columns = request["prompts"], request["completions"], request["columns"]
    size = 1 if request["each"] else len(completions)
    for start in range(0, len(completions), size):
        part = slice(start, start + size)
        part_columns = {name: values[part] for name, values in columns.items()}
        try:
            yield {"values": _values(reward, prompts[part], completions[part], part_columns)}
        except MoeReplayError as error:
            yield {"error": error_to_content(error)}
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


def error_to_content(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON has it: its class, its parts, and the traceback of its cause."""
    if not isinstance(error, MoeReplayError):
        trace = "".join(traceback.format_exception(error))
        return {"kind": "", "parts": {"problem": f"{type(error).__name__}: {one_line(error)}"}, "traceback": trace}
    parts, cause = {"problem": error.problem, **error.facts}, error.__cause__
    return {
        "kind": f"{type(error).__module__}:{type(error).__qualname__}",
        "parts": {name: part if isinstance(part, int | None) else str(part) for name, part in parts.items()},
        "traceback": "".join(traceback.format_exception(cause)) if cause is not None else "",
    }


def _send(stream: BufferedRWPair, message: Mapping[str, Any]) -> None:
    try:
        stream.write(to_frame(message))
        stream.flush()
    except OSError:  # the trainer is gone, or a function has closed descriptors that it had not opened
        os._exit(os.EX_IOERR)
