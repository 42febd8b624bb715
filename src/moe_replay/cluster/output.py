"""Output of an actor: into a file of the run's folder, and from rank 0 to the driver as well."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LOOK_S = 0.3
ASK_S = 1.0
"""Seconds between looks for new output, and between calls of the board without any: each costs Ray milliseconds."""
CHUNK = 2**16


def write_to(log: Path) -> int:
    """Send what this process writes to a file, which is appended to; returns where its output will begin."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="replace")
    return log.stat().st_size


class DriverLink:
    """Rank 0's connection to the driver: shows it what this rank writes, and ends the run when it asks for that.

    board   the run's `RunBoard`
    start   where the output of this rank begins in its log
    """

    def __init__(self, board: Any, log: Path, start: int) -> None:
        self._board = board
        self._log, self._position = log, start
        self._ending = threading.Event()
        self._seen = 0
        self._thread = threading.Thread(target=self._run, name="driver link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        from ray import get
        from ray.exceptions import RayError

        asked = float("-inf")
        with self._log.open("rb") as output:
            output.seek(self._position)
            while True:
                is_last = self._ending.wait(LOOK_S)
                written = output.read(CHUNK)
                try:
                    while written or is_last or time.monotonic() >= asked + ASK_S:
                        self._obey(get(self._board.tell.remote(written)))
                        asked = time.monotonic()
                        if len(written) < CHUNK:
                            break
                        written = output.read(CHUNK)
                except RayError:  # the driver is gone, and this process will be ended
                    return
                if is_last:
                    return

    def _obey(self, interrupts: int) -> None:
        if interrupts > self._seen:
            self._seen = interrupts
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun passes a signal on
