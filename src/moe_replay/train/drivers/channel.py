"""Messages between rank 0 and a driver process: JSON over a Unix socket, and descriptors of shared memory beside it."""

from __future__ import annotations

import os
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.train.reward_pool.wire import LENGTH, from_content, to_frame
from moe_replay.utils.messages import one_line

_PARTS = ("problem", "sample", "layer", "token", "expected", "found", "remedy")


class DriverError(MoeReplayError):
    """A driver process that has ended, or an error in it that no other class is for."""

    exit_status = ExitStatus.FAILED


class Message(NamedTuple):
    """A message, and the descriptor that came with it; -1: none."""

    content: dict[str, Any]
    file: int = -1


class Channel:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, content: Mapping[str, Any], file: int = -1) -> None:
        """Send a message, and with it a descriptor that the receiver gets a copy of; OSError if it has closed."""
        frame = memoryview(to_frame(content))
        with self._lock:
            if file >= 0:
                socket.send_fds(self.connection, [frame[:1]], [file])
                frame = frame[1:]
            self.connection.sendall(frame)

    def receive(self) -> Message | None:
        """Return the next message; None when the other end has closed."""
        head, file = b"", -1
        while len(head) < LENGTH.size:
            try:
                received, files, *_ = socket.recv_fds(self.connection, LENGTH.size - len(head), 1)
            except ConnectionError:
                received, files = b"", []
            file = files[0] if files else file
            if not received:
                if file >= 0:
                    os.close(file)
                return None
            head += received
        content = bytearray(*LENGTH.unpack(head))
        view = memoryview(content)
        while view:
            received_bytes = self.connection.recv_into(view)
            if not received_bytes:
                return None
            view = view[received_bytes:]
        return Message(from_content(bytes(content)), file)

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


def error_to_content(error: BaseException) -> dict[str, Any]:
    """Return an error as the content of a message."""
    trace = "".join(traceback.format_exception(error))
    if not isinstance(error, MoeReplayError):
        return {"kind": "", "parts": {"problem": f"{type(error).__name__}: {one_line(error)}"}, "traceback": trace}
    parts = {name: getattr(error, name) for name in _PARTS}
    texts = {name: part if part is None or isinstance(part, int) else str(part) for name, part in parts.items()}
    cause = error.__cause__
    return {
        "kind": f"{type(error).__module__}:{type(error).__qualname__}",
        "parts": texts,
        "traceback": "".join(traceback.format_exception(cause)) if cause is not None else "",
    }


def error_from_content(content: Mapping[str, Any], driver: str) -> MoeReplayError:
    """Return the error of a driver in its own class, where this process knows it."""
    usual = [kind for kind in _kinds(MoeReplayError) if kind.__init__ is MoeReplayError.__init__]
    kinds = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in usual}
    error = kinds.get(content["kind"], DriverError)(**content["parts"])
    if content["traceback"]:
        error.add_note(f"In {driver}:\n{content['traceback']}")
    return error


def _kinds(kind: type[MoeReplayError]) -> Iterator[type[MoeReplayError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)
