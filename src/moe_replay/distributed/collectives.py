"""Collectives over bytes of any length, never over pickled objects."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from moe_replay.distributed.control import control_group


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
    return [one[:size].cpu().numpy() for one, size in zip(received, sizes, strict=True)]


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
    """Return the device that a group communicates from."""
    if dist.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
