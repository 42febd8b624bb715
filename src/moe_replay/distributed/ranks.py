"""The ranks of a job: which one this is, text exchanged between them, and failures raised on all of them.

A process without a process group is rank 0 of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist

from moe_replay.distributed.collectives import all_gather, broadcast_bytes, control_group, device_of, wait_within
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.utils.misc import printable

FAILED_PATIENCE = timedelta(seconds=30)
"""Time that a failed rank waits for the others to reach the same point; then the failure is sent to them."""


class OtherRankError(MoeReplayError):
    """A failure on another rank; the message holds that rank's error."""

    def __init__(self, problem: str, *, exit_status: int = ExitStatus.FAILED) -> None:
        super().__init__(problem)
        self.exit_status = exit_status
        self.known_on_all_ranks = True


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather_text(text: str) -> list[str]:
    """Return the text of every rank, in rank order, on every rank."""
    if world_size() == 1:
        return [text]
    gathered = all_gather(np.frombuffer(text.encode(), np.uint8), control_group())
    return [part.tobytes().decode() for part in gathered]


def barrier() -> None:
    """Wait until every rank has come here."""
    any_rank(False)


def any_rank(flag: bool) -> bool:
    """Return on every rank whether the flag is set on any."""
    return _first_rank_with(flag) is not None


def from_rank_0(make: Callable[[], str], doing: str) -> str:
    """Return the result of `make` on rank 0 on every rank; if it fails there, raise on every rank."""
    with raise_on_all_ranks(doing):
        text = make() if rank() == 0 else None
    if world_size() == 1:
        return text or ""
    return broadcast_bytes(None if text is None else text.encode()).decode()


class raise_on_all_ranks:  # noqa: N801  a context manager, named as contextlib names its own
    """Work done by all ranks: if it fails on one, it raises on all once every rank has reached the end.

    Where others wait for the failed rank inside the block, they never reach it: after `FAILED_PATIENCE` the error is
    raised on the failed rank alone, and ends the others as any other error of a job does (`rank_watch.py`).
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return  # this process is ending, and must not wait for the others
        try:
            failed = _first_rank_with(error is not None)
        except RuntimeError:
            if error is None:
                raise
            return  # the others are not there
        if failed is None:
            return
        if isinstance(error, MoeReplayError):
            error.known_on_all_ranks = True
        status = error.exit_status if isinstance(error, MoeReplayError) else ExitStatus.FAILED
        report = f"{int(status)} {type(error).__name__}: {printable(error)}".encode() if rank() == failed else None
        message = broadcast_bytes(report, failed) if world_size() > 1 else report or b""
        if error is None:
            status_text, _, text = message.decode().partition(" ")
            raise OtherRankError(f"{self._doing} failed on rank {failed}: {text}", exit_status=int(status_text))


def _first_rank_with(flag: bool) -> int | None:
    """Return the first rank whose flag is set; None if there is none. Collective: call on every rank."""
    if world_size() == 1:
        return 0 if flag else None
    group = control_group()
    limit = FAILED_PATIENCE if flag and group is not None else None
    is_set = torch.tensor([int(flag)], device=device_of(group))
    flags = [torch.zeros_like(is_set) for _ in range(world_size())] if rank() == 0 else None
    wait_within(dist.gather(is_set, flags, 0, group=group, async_op=True), limit)
    first = torch.full_like(is_set, -1)
    if flags is not None and (set_on := torch.cat(flags).nonzero()).numel():
        first[0] = set_on[0, 0]
    wait_within(dist.broadcast(first, 0, group=group, async_op=True), limit)
    return None if int(first) < 0 else int(first)
