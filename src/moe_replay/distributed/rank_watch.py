"""Detect ranks that fail or exit early, and notify the others even while they are blocked.

A rank whose connection breaks gets an error from the library, which does not say whose it was or why. One that uses no
connection, because it samples or waits for a reward, gets none, and on GPUs a collective waits for minutes. So every
rank watches the processes of the others on its machine, and keeps a connection to rank 0, which passes on the error
that a rank reports before it ends. A rank whose connection closes without a message has been killed; one that is silent
for too long hangs, or its machine is unreachable.
"""

from __future__ import annotations

import json
import os
import re
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from types import TracebackType
from typing import NamedTuple, Self

from moe_replay.distributed.network import RankServer, admitted, machine_id, open_rank_server
from moe_replay.distributed.ranks import OtherRankError, all_gather_json, rank, world_size
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.utils.misc import one_line, printable
from moe_replay.utils.processes import start_time

CONNECT_S = 60.0
LINGER_S = 5.0
_LINE_BYTES = 2**16
_BYE, _HEARTBEAT = b"bye\n", b"\n"


class Failure(NamedTuple):
    """Failure of a rank: its error, None if it ended without a message, and its exit status."""

    rank: int
    error: str | None
    status: int = 1

    def line(self) -> bytes:
        return json.dumps(self).encode() + b"\n"


class RankLostError(MoeReplayError):
    """Another rank has ended, or cannot be reached."""

    exit_status = ExitStatus.FAILED


class FailureChannel:
    """One rank's end of the channel; `fileno()` becomes readable when a failure is known.

    silence_s   heartbeat timeout in seconds; a silent rank is treated as lost
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
        try:
            self._connect(server, ranks)
        except OSError as error:
            missing = sorted(set(range(ranks)) - {self.rank, *self._peers.values()})
            raise RankLostError(
                f"rank {self.rank} has no connection to {'rank 0' if self.rank else f'ranks {missing}'}",
                expected=f"connections to {server.host}:{server.port} within {CONNECT_S:.0f} s",
                found=one_line(error),
                remedy="Ranks on other machines must be able to reach rank 0's on any port: check for a firewall",
            ) from error
        for connection in self._peers:
            connection.settimeout(LINGER_S)
        self._thread = threading.Thread(target=self._run, name="failures of ranks", daemon=True)
        self._thread.start()

    def _connect(self, server: RankServer, ranks: int) -> None:
        if server.listener is None:
            connection = socket.create_connection((server.host, server.port), timeout=CONNECT_S)
            connection.sendall(server.token + self.rank.to_bytes(4, "little"))
            self._peers[connection] = 0
        else:
            with server.listener as listener, closing(admitted(listener, server.token, 4, CONNECT_S)) as connections:
                while len(self._peers) < ranks - 1:
                    connection, peer_rank = next(connections)
                    self._peers[connection] = int.from_bytes(peer_rank, "little")

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

    # ---- its thread ---------------------------------------------------------------------------------------

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
                    self._send(_HEARTBEAT)
                    spoken = now
                for connection, at in heard.items():
                    if now - at > self._silence_s:
                        self._lose(connection)

    def _read(self, connection: socket.socket, lines: list[bytes]) -> None:
        for line in filter(None, lines):
            if line + b"\n" == _BYE:
                self._left.add(self._peers[connection])
            else:
                self._note(Failure(*json.loads(line)), connection)

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


SILENCE_S = 600.0
"""Heartbeat timeout in seconds, unless the run has its own; a silent rank is treated as lost."""
EXIT_GRACE_S = 15.0
"""Seconds for a rank to shut down once another one has ended; less than torchrun grants."""
NOTICE_S = 5.0
"""Seconds between the end of a connection and that of the process it belonged to."""

_BROKEN = re.compile(r"closed by peer|reset by peer|Broken pipe|Socket closed|remote process exited", re.IGNORECASE)


class RankWatch:
    """Watches the other ranks from `start` to `stop`: their messages, and their processes on this machine (Linux only).

    with watch:        # an error because of another rank names it; any other error is sent to all ranks
        ...
    """

    def __init__(self) -> None:
        self._rank = 0
        self._ranks: dict[int, int] = {}  # by the descriptor of their process
        self._channel: FailureChannel | None = None
        self._stopping: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def start(self, silence_s: float = SILENCE_S, *, processes: bool = True) -> None:
        """Exchange process ids with the other ranks, and begin to watch. Collective: call on every rank.

        silence_s   heartbeat timeout in seconds; a silent rank is treated as lost
        processes   watch the processes of ranks on this machine, not only their messages
        """
        if world_size() == 1:
            return
        self._rank = rank()
        here, own_pid = machine_id(), os.getpid()
        processes_of_ranks = all_gather_json([here, own_pid, start_time(own_pid)])
        for peer, (machine, pid, started) in enumerate(processes_of_ranks):
            if processes and here and machine == here and peer != self._rank and start_time(pid) == started:
                with suppress(ProcessLookupError):  # it has just ended, and so will the connection to it
                    self._ranks[os.pidfd_open(pid)] = peer
        self._channel = FailureChannel(self._rank, silence_s)
        server = open_rank_server([machine for machine, *_ in processes_of_ranks], "listening for the other ranks")
        self._channel.open(server, len(processes_of_ranks))
        self._stopping = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; ranks that end later are not failures."""
        if self._stopping is None or self._thread is None:
            return
        os.write(self._stopping[1], b".")
        self._thread.join()
        for descriptor in (*self._stopping, *self._ranks):
            os.close(descriptor)
        if self._channel is not None:
            self._channel.close()
        self._ranks, self._stopping, self._channel = {}, None, None

    def ended(self, wait_s: float = 0.0) -> list[int]:
        """Return the ranks on this machine whose process has ended; wait up to `wait_s` for the first one."""
        return sorted(self._ranks[descriptor] for descriptor in _ready(self._ranks, wait_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        broken = _broken_connection(error) if world_size() > 1 else None
        failure = self._failure(NOTICE_S if broken is not None else 0.0)
        if failure is not None and failure.error is not None and isinstance(error, RuntimeError):
            raise OtherRankError(f"rank {failure.rank}: {failure.error}", exit_status=failure.status) from error
        if broken is None:
            if isinstance(error, Exception) and not getattr(error, "known_on_all_ranks", False) and self._channel:
                status = error.exit_status if isinstance(error, MoeReplayError) else ExitStatus.FAILED
                self._channel.publish(f"{type(error).__name__}: {printable(error)}", status)
            self.stop()
            return
        ended = self.ended(NOTICE_S) if self._ranks else []
        if not ended and failure is not None:
            ended = [failure.rank]
        lost = RankLostError(
            f"{_names(ended)} ended during the run" if ended else f"a connection to another rank is lost: {broken}",
            remedy="Its own output, or its launcher, says why. The same command resumes from the newest checkpoint",
        )
        alive = {self._rank, *self._ranks.values()} - set(ended)
        lost.known_on_all_ranks = self._rank != min(alive)  # one rank of each machine reports it
        raise lost from error

    def _failure(self, wait_s: float) -> Failure | None:
        """Return the failure of another rank, if known; wait for it as long as no process has ended."""
        deadline = time.monotonic() + wait_s
        while self._channel is not None and self._channel.failure is None and time.monotonic() < deadline:
            _ready([self._channel.fileno()], 0.05)
        return None if self._channel is None else self._channel.failure

    def _watch(self) -> None:
        assert self._stopping is not None
        assert self._channel is not None
        stopped, _ = self._stopping
        if stopped in _ready([stopped, self._channel.fileno(), *self._ranks]) or _ready([stopped], EXIT_GRACE_S):
            return
        failure = self._channel.failure
        if failure is not None and failure.error is not None:
            text = f"rank {failure.rank}: {failure.error}"
        else:
            text = f"{_names(self.ended() or [failure.rank if failure else -1])} ended during the run"
        os.write(2, f"rank {self._rank}: {text}: ending\n".encode())
        os._exit(ExitStatus.FAILED)


def _ready(descriptors: Iterable[int], wait_s: float | None = None) -> list[int]:
    """Return the descriptors that can be read; wait for the first, forever if no limit is given."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if wait_s is None else wait_s * 1000)]


def _broken_connection(error: BaseException | None) -> str | None:
    """Return the message of the library, if a broken connection between ranks is what an error comes from."""
    while error is not None:
        if isinstance(error, RuntimeError) and _BROKEN.search(str(error)):
            return one_line(error)
        error = error.__cause__ or error.__context__
    return None


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
