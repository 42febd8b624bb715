"""What ranks tell each other besides tensors: what the first has found, and whether all are well.

A process without a process group is rank 0 of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np
import torch.distributed as dist

from moe_replay.distributed.collectives import all_gather
from moe_replay.errors import MoeReplayError


class OtherRankError(MoeReplayError):
    """Something failed on another rank; the message is what that rank says."""


def rank() -> int:
    """Number of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def tell_all(text: str) -> list[str]:
    """What each rank says, in the order of ranks, on every rank."""
    if world_size() == 1:
        return [text]
    said = all_gather(np.frombuffer(text.encode(), np.uint8))
    return [part.tobytes().decode() for part in said]


def from_first(make: Callable[[], str], doing: str) -> str:
    """What rank 0 makes, on every rank; where that fails it fails on every rank."""
    with Together(doing):
        made = make() if rank() == 0 else ""
    return tell_all(made)[0]


class Together:
    """Work that all ranks do; if it fails on one it fails on all, once all have come to its end.

    It cannot help a rank that waits in a collective for one that has failed: the process group's timeout does.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return  # this process is about to end: it asks nobody
        reports = tell_all("" if error is None else f"{type(error).__name__}: {error}")
        failed = [number for number, report in enumerate(reports) if report]
        if failed and error is None:
            raise OtherRankError(f"{self._doing} failed on rank {failed[0]}: {reports[failed[0]]}")
