"""Signals that ask a process to end: the first is handled in order, a later one ends the process immediately.

Python runs handlers in the main thread, between two of its instructions. A main thread that waits in a library (a
collective with a dead rank) never gets there. So signals are also counted in a thread, by the byte that Python's C
handler writes for each.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CREDENTIALS = struct.Struct("3i")  # pid, user, group of the sender


@contextmanager
def time_limit(limit_s: float, error: Exception) -> Iterator[None]:
    """Raise `error` in this block if it takes longer; only the main thread can be interrupted, in any other it may.

    Ends Python code and calls that sleep, but no extension that does not return to Python.
    """
    if limit_s == math.inf or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> None:
        raise error

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)


class EndSignals:
    """Handles SIGINT, SIGTERM and SIGHUP while open; those that the process ignores (nohup) stay ignored.

    on_signal   called in the main thread with the number of the signal and how many there have been
    end_after   signals after which the process is ended immediately, with status 128 + signal
    farewell    line written to standard error then

    Only the main thread can handle signals; in any other it does nothing.
    """

    def __init__(
        self, on_signal: Callable[[signal.Signals, int], None], end_after: int, farewell: str = "ended by a signal"
    ) -> None:
        self._on_signal = on_signal
        self._end_after = end_after
        self._farewell = farewell
        self._count = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._previous_fd = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._handle) for number in handled}
            reader, writer = self._sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            if hasattr(socket, "SO_PASSCRED"):
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            writer.setblocking(False)
            self._previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        if self._sockets is not None:
            _, writer = self._sockets
            signal.set_wakeup_fd(self._previous_fd)
            with contextlib.suppress(OSError):
                writer.send(b"\0")  # ends the thread, which closes the other end
            writer.close()
            self._sockets = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._on_signal(signal.Signals(number), self._count)

    def _watch(self, reader: socket.socket) -> None:
        """Count signals of this process; a forked child still has the socket and writes to it too."""
        count = 0
        with reader:
            while True:
                content, extra, _, _ = reader.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
                pids = [_CREDENTIALS.unpack_from(data)[0] for _, _, data in extra if len(data) >= _CREDENTIALS.size]
                if pids and pids[0] != os.getpid():
                    continue
                if content in (b"", b"\0"):
                    return
                count += content[0] in SIGNALS
                if count >= self._end_after:
                    self.end_now(content[0])

    def end_now(self, number: int) -> None:
        """End this process without any cleaning up."""
        os.write(2, f"\nmoe-replay: {signal.Signals(number).name}: {self._farewell}\n".encode())
        os._exit(128 + number)
