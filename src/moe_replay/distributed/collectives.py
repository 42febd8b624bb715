"""Messages between ranks: the control group, collectives over bytes (never pickled objects), tensors point to point.

The control group is a separate gloo group, independent of the tensors' backend. A rank may wait in it for as long as
another one samples, loads or saves: whether the others are alive is known from `rank_watch.py`, not from a timeout. No
rank waits in a collective of the tensors' backend, which occupies its device and ends with that backend's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_replay.errors import LayoutError

PATIENCE = timedelta(days=365)
ACROSS, WITHIN = "across", "within"
"""Dimensions of a grid of ranks: over its groups, and the ranks of one group."""

_GROUPS: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # by the process group of all ranks
_GRIDS: dict[tuple[Any, int], DeviceMesh] = {}  # by the process group of all ranks, and size
_STUCK: list[dist.ProcessGroup] = []  # groups with an operation that never ends: destroying one would wait for it


def control_group() -> dist.ProcessGroup | None:
    """Return the control group; None, which is the group of all ranks, where no job has opened one."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return None if world is None else _GROUPS.get(world)


@contextmanager
def open_control_group() -> Iterator[None]:
    """Have a control group inside this context. Collective: enter it on every rank."""
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


def rank_grid(size: int, device: torch.device, setting: str) -> DeviceMesh:
    """Return all ranks as a grid, in groups of `size` that follow each other. Collective.

    Every caller gets the same grid. It ends with the process: ending a group of gloo alone crashed ranks.
    """
    ranks = dist.get_world_size()
    if ranks % size:
        raise LayoutError(
            f"{setting} does not divide the ranks",
            expected=f"a multiple of {size} ranks",
            found=f"{ranks} rank{'s' * (ranks > 1)}",
            remedy=f"Start another number of ranks, or change {setting}",
        )
    key = dist.group.WORLD, size
    if key not in _GRIDS:
        _GRIDS[key] = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=(ACROSS, WITHIN))
    return _GRIDS[key]


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


def all_gather(content: np.ndarray, group: dist.ProcessGroup | None = None) -> list[np.ndarray]:
    """Return the bytes (N,) uint8 of every rank, in rank order; N may differ between ranks."""
    device = device_of(group)
    length = torch.tensor([content.size], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = torch.cat(lengths).tolist()
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device=device)
    padded[: content.size] = torch.from_numpy(content.copy())
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return [buffer[:size].cpu().numpy() for buffer, size in zip(received, sizes, strict=True)]


def broadcast_bytes(content: bytes | None, source: int = 0) -> bytes:
    """Return the bytes of one rank on every rank, over the control group; the others pass None."""
    group = control_group()
    device = device_of(group)
    size = torch.tensor([len(content or b"")], dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=group)
    sent = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if content:
        sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(sent, source, group=group)
    return sent.cpu().numpy().tobytes()


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


class Exchange:
    """Sends and receives of this rank, which `run` starts together.

    Two ranks must name their tensors in the same order. Ranks that exchange nothing need not call it.
    """

    def __init__(self) -> None:
        self._operations: list[dist.P2POp] = []

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to a rank; it must not change before `run` has returned."""
        if tensor.numel():
            self._operations.append(dist.P2POp(dist.isend, tensor.detach().contiguous(), to))

    def receive(self, into: Tensor, source: int) -> None:
        """Receive a tensor from a rank into a contiguous one."""
        if into.numel():
            self._operations.append(dist.P2POp(dist.irecv, into, source))

    def run(self) -> None:
        operations, self._operations = self._operations, []
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
