"""Rank 0 serves records of trajectories to ranks on other machines: from its file to the socket, without a copy.

request: token | u64 length | JSON [batch, section, numbers of records]
answer:  u64 length | a section (`wire.py`) of these records; length 0: rank 0 has no such batch
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from moe_replay.distributed.rank_server import has_token, receive_into
from moe_replay.train.trajectories.wire import read_table, table, table_bytes

LENGTH = struct.Struct("<Q")
THREADS = 32
_REQUEST_BYTES = 2**26


class _Offer(NamedTuple):
    """A batch that is served: its number, its own file descriptor, and its sections."""

    number: int
    file: int
    sections: tuple[tuple[int, int], ...]


class SectionServer:
    """Answers requests in its own threads, from `offer` to `withdraw`.

    sent_bytes   of all answers
    """

    def __init__(self, listener: socket.socket, token: bytes, timeout_s: float) -> None:
        self.sent_bytes = 0
        self._listener, self._token, self._timeout_s = listener, token, timeout_s
        self._offer: _Offer | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "trajectories")
        threading.Thread(target=self._accept, name="trajectories", daemon=True).start()

    def offer(self, number: int, file: int, sections: Sequence[tuple[int, int]]) -> None:
        """Serve a batch from a file."""
        self._offer = _Offer(number, file, tuple(sections))

    def withdraw(self) -> None:
        """Serve nothing any more: every rank has what it asked for."""
        self._offer = None

    def close(self) -> None:
        """Stop listening."""
        self.withdraw()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                self._pool.submit(self._answer, connection)
            except (OSError, RuntimeError):  # closed
                return

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the rank that asked says what went wrong
            connection.settimeout(self._timeout_s)
            length = bytearray(LENGTH.size)
            if not has_token(connection, self._token) or receive_into(connection, memoryview(length)) < len(length):
                return
            asked = bytearray(min(*LENGTH.unpack(length), _REQUEST_BYTES))
            if receive_into(connection, memoryview(asked)) < len(asked):
                return
            number, section, numbers = json.loads(asked)
            offer = self._offer
            if offer is None or offer.number != number:
                connection.sendall(LENGTH.pack(0))
                return
            self._send(connection, os.dup(offer.file), offer.sections[section][0], numbers)

    def _send(self, connection: socket.socket, file: int, start: int, numbers: Sequence[int]) -> None:
        with os.fdopen(file, "rb") as opened:
            count = int.from_bytes(os.pread(file, 8, start), "little")
            offsets = read_table(memoryview(os.pread(file, table_bytes(count), start))).astype(np.int64)
            chosen = np.asarray(numbers, np.int64)
            sizes = offsets[chosen + 1] - offsets[chosen]
            own = table((table_bytes(len(chosen)) + np.concatenate([[0], np.cumsum(sizes)])).tolist())
            total = len(own) + int(sizes.sum())
            connection.sendall(LENGTH.pack(total) + own)
            for begin, end in _runs(offsets[chosen].tolist(), offsets[chosen + 1].tolist()):
                connection.sendfile(opened, start + begin, end - begin)
        with self._lock:
            self.sent_bytes += total


def _runs(begins: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield stretches of bytes, with those that follow each other as one."""
    run: tuple[int, int] | None = None
    for begin, end in zip(begins, ends, strict=True):
        if run is not None and run[1] == begin:
            run = run[0], end
            continue
        if run is not None:
            yield run
        run = begin, end
    if run is not None:
        yield run
