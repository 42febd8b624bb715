"""Report the failure of a rank to all others at once, on any machine and even while they are blocked.

Every rank keeps a connection to rank 0, which passes on what one of them says before it ends. A rank whose connection
closes without a message has been killed; one that is silent for too long hangs, or its machine is unreachable.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from moe_replay.distributed.rank_server import RankServer, has_token, receive_into

CONNECT_S = 60.0
LINGER_S = 5.0
_LINE_BYTES = 2**16
_BYE, _SIGN_OF_LIFE = b"bye\n", b"\n"


class Failure(NamedTuple):
    """Failure of a rank: its error, None if it ended without a message, and its exit status."""

    rank: int
    error: str | None
    status: int = 1

    def line(self) -> bytes:
        """Return the failure as one line."""
        return json.dumps(self).encode() + b"\n"


class FailureChannel:
    """One rank's end of the channel; `fileno()` becomes readable when a failure is known.

    silence_s   seconds without a sign of life after which a rank counts as lost
    """

    def __init__(self, rank: int, silence_s: float) -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._known, self._tell = os.pipe()
        self._wake, self._closing = socket.socketpair()
        self._peers: dict[socket.socket, int] = {}
        self._left: set[int] = set()  # ranks that are done
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Return a descriptor that can be read once a failure is known."""
        return self._known

    # ---- opening ------------------------------------------------------------------------------------------------

    def open(self, server: RankServer, ranks: int) -> None:
        """Connect to rank 0, or on rank 0 take the connections of all others."""
        if server.listener is None:
            connection = socket.create_connection((server.host, server.port), timeout=CONNECT_S)
            connection.sendall(server.token + self.rank.to_bytes(4, "little"))
            self._peers[connection] = 0
        else:
            with server.listener as listener:
                listener.settimeout(CONNECT_S)
                while len(self._peers) < ranks - 1:
                    connection, _ = listener.accept()
                    self._admit(connection, server.token)
        self._start()

    def _admit(self, connection: socket.socket, token: bytes) -> None:
        connection.settimeout(CONNECT_S)
        number = bytearray(4)
        if has_token(connection, token) and receive_into(connection, memoryview(number)) == len(number):
            self._peers[connection] = int.from_bytes(number, "little")
        else:
            connection.close()

    def _start(self) -> None:
        for connection in self._peers:
            connection.settimeout(LINGER_S)
        self._thread = threading.Thread(target=self._run, name="failures of ranks", daemon=True)
        self._thread.start()

    # ---- use ----------------------------------------------------------------------------------------------------

    def publish(self, error: str, status: int = 1) -> None:
        """Tell all other ranks that this one ends with an error."""
        self._send(Failure(self.rank, error[: _LINE_BYTES // 2], status).line())

    def close(self) -> None:
        """Leave: this rank may end from now on, and so may the others."""
        if self._thread is not None:
            self._send(_BYE)
            self._closing.send(b".")
            self._thread.join()
            self._thread = None
        for connection in (*self._peers, self._wake, self._closing):
            connection.close()
        for descriptor in (self._known, self._tell):
            os.close(descriptor)

    def _send(self, line: bytes, but: socket.socket | None = None) -> None:
        with self._lock:
            for connection in self._peers:
                if connection is not but:
                    with suppress(OSError):  # it has ended itself
                        connection.sendall(line)

    # ---- in its thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = min(self._silence_s / 4, 15.0)
        heard = dict.fromkeys(self._peers, time.monotonic())
        unread = dict.fromkeys(self._peers, b"")
        spoken = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for readable in (self._wake, *self._peers):
                selector.register(readable, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(pause):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is self._wake:
                        return
                    try:
                        received = connection.recv(_LINE_BYTES)
                    except OSError:
                        received = b""
                    heard[connection] = time.monotonic()
                    *lines, unread[connection] = (unread[connection] + received).split(b"\n")
                    self._read(connection, lines)
                    if not received:
                        selector.unregister(connection)
                        heard.pop(connection)
                        self._lose(connection)
                now = time.monotonic()
                if now - spoken >= pause:
                    self._send(_SIGN_OF_LIFE)
                    spoken = now
                for connection, at in heard.items():
                    if now - at > self._silence_s:
                        self._lose(connection)

    def _read(self, connection: socket.socket, lines: list[bytes]) -> None:
        for line in filter(None, lines):
            if line + b"\n" == _BYE:
                self._left.add(self._peers[connection])
            else:
                number, error, status = json.loads(line)
                self._note(Failure(number, error, status), connection)

    def _lose(self, connection: socket.socket) -> None:
        if self._peers[connection] not in self._left:
            self._note(Failure(self._peers[connection], None), connection)

    def _note(self, failure: Failure, source: socket.socket) -> None:
        """Keep the first failure, and on rank 0 pass it on."""
        if self.failure is None:
            self.failure = failure
            os.write(self._tell, b".")
            if self.rank == 0:
                self._send(failure.line(), but=source)
