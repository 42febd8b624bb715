"""The ranks of a job: which one this is, text exchanged between them, and failures raised on all of them alike.

A process without a process group is rank 0 of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np
import torch.distributed as dist

from moe_replay.distributed.collectives import all_gather
from moe_replay.errors import MoeReplayError
from moe_replay.utils.exit_status import ExitStatus


class OtherRankError(MoeReplayError):
    """A failure on another rank; the message holds that rank's error."""

    def __init__(self, problem: str, *, exit_status: int = ExitStatus.FAILED) -> None:
        super().__init__(problem)
        self.exit_status = exit_status
        self.known_on_all_ranks = True


def rank() -> int:
    """Return the number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather_text(text: str) -> list[str]:
    """Return the text of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [text]
    gathered = all_gather(np.frombuffer(text.encode(), np.uint8))
    return [part.tobytes().decode() for part in gathered]


def from_rank_0(make: Callable[[], str], doing: str) -> str:
    """Return on every rank what `make` returns on rank 0; if it fails there, raise on every rank."""
    with raise_on_all_ranks(doing):
        made = make() if rank() == 0 else ""
    return all_gather_text(made)[0]


class raise_on_all_ranks:  # noqa: N801  a context manager, named as contextlib names its own
    """Work done by all ranks: if it fails on one, it raises on all once every rank has reached the end.

    A rank that waits in a collective for one that has failed is not released by this; the process group's timeout is
    what ends it.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return  # this process is ending, and must not wait for the others
        status = error.exit_status if isinstance(error, MoeReplayError) else ExitStatus.FAILED
        reports = all_gather_text("" if error is None else f"{int(status)} {type(error).__name__}: {error}")
        failed = [number for number, report in enumerate(reports) if report]
        if isinstance(error, MoeReplayError):
            error.known_on_all_ranks = True
        if failed and error is None:
            status_text, _, report = reports[failed[0]].partition(" ")
            raise OtherRankError(f"{self._doing} failed on rank {failed[0]}: {report}", exit_status=int(status_text))
