"""Ctrl-C, SIGTERM and SIGHUP: finish and save the current step first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from moe_replay.distributed.ranks import any_rank
from moe_replay.utils.signals import EndSignals


class InterruptHandler(EndSignals):
    """While open, the first signal only sets a flag that the loop checks after each step.

    Inside a program of the user's own the second one raises KeyboardInterrupt, and the third ends the process. With
    `ends_process`, as in the command line, the second one ends it in any case.

    stopped_after   the step after which the flag has ended the run, if it has

    with InterruptHandler() as interrupts:
        for step in ...:
            ...
            if interrupts.stop_requested():      # the same on all ranks
                break
    """

    def __init__(self, ends_process: bool = False) -> None:
        self.stopped_after: int | None = None
        self._received = False
        self._raises = False
        self._ends_process = ends_process
        farewell = "ended without saving; the run resumes from its newest checkpoint"
        super().__init__(self._note, end_after=2 if ends_process else 3, farewell=farewell)

    def _note(self, number: signal.Signals, count: int) -> None:
        again, self._received = self._received, True
        if self._raises or (again and not self._ends_process):
            raise KeyboardInterrupt
        if not again and os.environ.get("RANK", "0") == "0":
            os.write(2, f"\nmoe-replay: {number.name}: finishing the step, then saving; repeat to exit now\n".encode())

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """Inside, the first signal raises KeyboardInterrupt immediately: for long work before the first step.

        So does one that came before.
        """
        self._raises = True
        try:
            if self._received:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def stop_requested(self) -> bool:
        """Return whether any rank has received a signal. All ranks call it."""
        return any_rank(self._received)
