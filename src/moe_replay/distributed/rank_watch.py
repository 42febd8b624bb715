"""Ranks on this machine that end before the run does: each of the others notices, whatever it waits for.

A rank whose connection breaks gets an error from the library, which does not say whose it was. One that uses no
connection, because it samples or waits for a reward, gets none, and on GPUs a collective waits for minutes. So every
rank watches the processes of the others on its machine.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from moe_replay.distributed.ranks import all_gather_text, rank, world_size
from moe_replay.errors import MoeReplayError
from moe_replay.utils.exit_status import ExitStatus
from moe_replay.utils.messages import one_line
from moe_replay.utils.processes import start_time

GRACE_S = 20.0
"""Seconds in which a rank closes what it has opened, once another one has ended; less than torchrun grants."""
NOTICE_S = 5.0
"""Seconds between the end of a connection and that of the process it belonged to."""

_BROKEN = re.compile(r"closed by peer|reset by peer|Broken pipe|Socket closed|remote process exited", re.IGNORECASE)


class RankLostError(MoeReplayError):
    """Another rank has ended, or cannot be reached any more."""

    exit_status = ExitStatus.FAILED


class RankWatch:
    """Watches the other ranks on this machine from `start` to `stop`; Linux only, elsewhere it knows of none.

    with watch:        # an error by a broken connection becomes one that names the rank; other errors end the watch
        ...
    """

    def __init__(self) -> None:
        self._rank = 0
        self._ranks: dict[int, int] = {}  # by the descriptor of their process
        self._stopping: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Tell the other ranks which process this is, and begin to watch. All ranks call it."""
        self._rank = rank()
        here = _machine()
        for other, text in enumerate(all_gather_text(f"{here} {os.getpid()} {start_time(os.getpid())}")):
            machine, pid, started = text.rsplit(" ", 2)
            if here and machine == here and other != self._rank and str(start_time(int(pid))) == started:
                with suppress(ProcessLookupError):  # it has ended meanwhile, and so will the connection to it
                    self._ranks[os.pidfd_open(int(pid))] = other
        if self._ranks:
            self._stopping = os.pipe()
            self._thread = threading.Thread(target=self._watch, name="rank watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Other ranks may end from now on."""
        if self._stopping is None or self._thread is None:
            return
        os.write(self._stopping[1], b".")
        self._thread.join()
        for descriptor in (*self._stopping, *self._ranks):
            os.close(descriptor)
        self._ranks, self._stopping = {}, None

    def ended(self, wait_s: float = 0.0) -> list[int]:
        """Return the ranks on this machine whose process has ended; wait up to `wait_s` for the first one."""
        return sorted(self._ranks[descriptor] for descriptor in _ready(self._ranks, wait_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        broken = _broken_connection(error) if world_size() > 1 else None
        if broken is None:
            self.stop()
            return
        ended = self.ended(NOTICE_S) if self._ranks else []
        lost = RankLostError(
            f"{_names(ended)} ended during the run" if ended else f"a connection to another rank is lost: {broken}",
            remedy="What it printed, or its launcher, says why. The same command resumes from the newest checkpoint",
        )
        alive = {self._rank, *self._ranks.values()} - set(ended)
        lost.known_on_all_ranks = self._rank != min(alive)  # one rank of each machine reports it
        raise lost from error

    def _watch(self) -> None:
        assert self._stopping is not None
        stopped, _ = self._stopping
        if stopped in _ready([stopped, *self._ranks]) or _ready([stopped], GRACE_S):
            return
        os.write(2, f"rank {self._rank}: {_names(self.ended())} ended during the run: ending\n".encode())
        os._exit(1)


def _ready(descriptors: Iterable[int], wait_s: float | None = None) -> list[int]:
    """Return the descriptors that can be read; wait for the first, forever if no limit is given."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if wait_s is None else wait_s * 1000)]


def _machine() -> str:
    """Return what the processes of this machine have in common, or of a container; "" where they cannot be watched."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except (AttributeError, OSError):
        return ""


def _broken_connection(error: BaseException | None) -> str | None:
    """Return the message of the library, if a broken connection between ranks is what an error comes from."""
    while error is not None:
        if isinstance(error, RuntimeError) and _BROKEN.search(str(error)):
            return one_line(error)
        error = error.__cause__ or error.__context__
    return None


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
