"""Detect ranks that fail or exit early, and notify the others even while they are blocked.

A rank whose connection breaks gets an error from the library, which does not say whose it was or why. One that uses no
connection, because it samples or waits for a reward, gets none, and on GPUs a collective waits for minutes. So a rank
that fails tells the others (`failures.py`), and every rank watches the processes of the others on its machine.
"""

from __future__ import annotations

import json
import os
import re
import select
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

from moe_replay.distributed.failures import Failure, FailureChannel
from moe_replay.distributed.machines import machine_id
from moe_replay.distributed.rank_server import open_rank_server
from moe_replay.distributed.ranks import OtherRankError, all_gather_text, rank, world_size
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.utils.messages import one_line
from moe_replay.utils.processes import start_time

SILENCE_S = 600.0
"""Seconds without a sign of life after which a rank counts as lost, unless the run says otherwise."""
GRACE_S = 15.0
"""Seconds in which a rank closes what it has opened, once another one has ended; less than torchrun grants."""
NOTICE_S = 5.0
"""Seconds between the end of a connection and that of the process it belonged to."""

_BROKEN = re.compile(r"closed by peer|reset by peer|Broken pipe|Socket closed|remote process exited", re.IGNORECASE)


class RankLostError(MoeReplayError):
    """Another rank has ended, or cannot be reached any more."""

    exit_status = ExitStatus.FAILED


class RankWatch:
    """Watches the other ranks from `start` to `stop`: what they say, and their processes on this machine (Linux only).

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
        """Tell the other ranks which process this is, and begin to watch. All ranks call it.

        silence_s   seconds without a sign of life after which a rank counts as lost
        processes   watch the processes of ranks on this machine, not only what ranks say
        """
        if world_size() == 1:
            return
        self._rank = rank()
        here, own = machine_id(), os.getpid()
        places = [json.loads(text) for text in all_gather_text(json.dumps([here, own, start_time(own)]))]
        for other, (machine, pid, started) in enumerate(places):
            if processes and here and machine == here and other != self._rank and start_time(pid) == started:
                with suppress(ProcessLookupError):  # it has ended meanwhile, and so will the connection to it
                    self._ranks[os.pidfd_open(pid)] = other
        self._channel = FailureChannel(self._rank, silence_s)
        server = open_rank_server([machine for machine, *_ in places], "listening for the other ranks")
        self._channel.open(server, len(places))
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
            told = OtherRankError(f"rank {failure.rank}: {failure.error}", exit_status=failure.status)
            raise told from error
        if broken is None:
            if isinstance(error, Exception) and not getattr(error, "known_on_all_ranks", False) and self._channel:
                status = error.exit_status if isinstance(error, MoeReplayError) else ExitStatus.FAILED
                self._channel.publish(f"{type(error).__name__}: {error}", status)
            self.stop()
            return
        ended = self.ended(NOTICE_S) if self._ranks else []
        if not ended and failure is not None:
            ended = [failure.rank]
        lost = RankLostError(
            f"{_names(ended)} ended during the run" if ended else f"a connection to another rank is lost: {broken}",
            remedy="What it printed, or its launcher, says why. The same command resumes from the newest checkpoint",
        )
        alive = {self._rank, *self._ranks.values()} - set(ended)
        lost.known_on_all_ranks = self._rank != min(alive)  # one rank of each machine reports it
        raise lost from error

    def _failure(self, wait_s: float) -> Failure | None:
        """Return what is known of a rank that failed; wait for it as long as no process has ended."""
        deadline = time.monotonic() + wait_s
        while self._channel is not None and self._channel.failure is None and time.monotonic() < deadline:
            _ready([self._channel.fileno()], 0.05)
        return None if self._channel is None else self._channel.failure

    def _watch(self) -> None:
        assert self._stopping is not None
        assert self._channel is not None
        stopped, _ = self._stopping
        if stopped in _ready([stopped, self._channel.fileno(), *self._ranks]) or _ready([stopped], GRACE_S):
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
