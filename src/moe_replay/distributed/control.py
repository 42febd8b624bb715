"""The control group of a job: a separate gloo group for messages, whatever backend the tensors use.

A rank may wait in it for as long as another one samples, loads or saves: whether the others are alive is known from
`rank_watch.py`, not from a timeout. No rank waits in a collective of the tensors' backend meanwhile, which occupies its
device and ends with that backend's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(days=365)

_GROUPS: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # by the process group of all ranks
_STUCK: list[dist.ProcessGroup] = []  # groups with an operation that never ends: destroying one would wait for it


def control_group() -> dist.ProcessGroup | None:
    """Return the control group; None, which is the group of all ranks, where no job has opened one."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else _GROUPS.get(world)


@contextmanager
def open_control_group() -> Iterator[None]:
    """Have a control group inside this context. All ranks enter it."""
    world = dist.group.WORLD
    if world is None or world in _GROUPS or dist.get_world_size() == 1:
        yield
        return
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(group, dist.ProcessGroup)
    _GROUPS[world] = group
    try:
        yield
    finally:
        del _GROUPS[world]
        if group not in _STUCK:
            dist.destroy_process_group(group)


def wait_within(work: dist.Work | None, limit: timedelta | None) -> None:
    """Wait for an operation of the control group; after `limit` raise, and leave the group as it is for good."""
    if work is None:  # this rank has no part in it
        return
    if limit is None:
        work.wait()
        return
    try:
        work.wait(limit)
    except RuntimeError:
        group = control_group()
        if group is not None:
            _STUCK.append(group)
        raise
