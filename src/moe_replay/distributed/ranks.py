"""The ranks of a job: which one this is, values exchanged between them as JSON, and failures raised on all of them.

A process without a process group is rank 0 of 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

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


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank, in rank order, on every rank, as it is read from JSON.

    group   of all ranks; None: the control group
    """
    own = np.frombuffer(json.dumps(value).encode(), np.uint8)
    gathered = [own] if world_size() == 1 else all_gather(own, group or control_group())
    return [json.loads(part.tobytes()) for part in gathered]


def barrier() -> None:
    """Wait until every rank has come here."""
    any_rank(False)


def any_rank(flag: bool) -> bool:
    """Return on every rank whether the flag is set on any."""
    return _first_rank_with(flag) is not None


def from_rank_0(make: Callable[[], Any], doing: str) -> Any:
    """Return what `make` returns on rank 0 on every rank, as it is read from JSON; if it fails, raise on every rank."""
    content = b""
    with raise_on_all_ranks(doing):
        if rank() == 0:
            content = json.dumps(make()).encode()
    return json.loads(broadcast_bytes(content) if world_size() > 1 else content)


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
