"""The weights and the state of a policy, for tests that look at them outside of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.distributed.ranks import world_size
from moe_replay.train.backends.base import Backend
from moe_replay.train.checkpoint import rng
from moe_replay.weights.source import tensors_of


def all_weights(backend: Backend) -> Iterator[tuple[str, Tensor]]:
    """Iterate over all weights on every rank. All ranks must exhaust it."""
    return tensors_of(backend.weight_source(), range(world_size()))


def save_state(backend: Backend, folder: Path) -> None:
    """Save weights and optimizer state, so that `load` resumes. All ranks call it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.stage()(folder)
    dist.barrier()  # no rank reads before every file is written


def save_random_state(folder: Path, device: torch.device) -> None:
    """Write the generator states of this rank to its own file."""
    rng.stage(device)(folder)
