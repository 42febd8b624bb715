"""Ends a process in which no Python code runs any more: a function that hangs in C code keeps the interpreter's lock.

No thread can raise an error then, and no signal handler runs. The timer of `faulthandler` does not need the lock: it
writes the stacks of all threads, which name the function, and ends the process with status 1.
"""

from __future__ import annotations

import faulthandler
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GRACE_S = 60.0
_LONGEST_S = 1e7
_STDERR = 2


class HangWatch:
    """One timer for all threads that wait for a user's function; it starts anew whenever one of them begins to wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0

    @contextmanager
    def waiting(self, limit_s: float) -> Iterator[None]:
        """End the process if this block takes much longer than `limit_s`, after which the waiting thread gives up."""
        if limit_s == math.inf:
            yield
            return
        with self._lock:
            self._waiting += 1
            faulthandler.dump_traceback_later(min(limit_s + GRACE_S, _LONGEST_S), exit=True, file=_STDERR)
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    faulthandler.cancel_dump_traceback_later()


WATCH = HangWatch()
"""Of this process, as the timer of `faulthandler` is."""
