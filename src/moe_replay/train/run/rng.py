"""The random generator states of a rank in a file: CPU and, if it has one, GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_replay.distributed.ranks import rank
from moe_replay.utils.files import apply_umask


def save(folder: Path, device: torch.device) -> None:
    """Write the generator states of this rank to its own file."""
    from safetensors.torch import save_file

    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    save_file(states, _file(folder))
    apply_umask(_file(folder))


def load(folder: Path, device: torch.device) -> None:
    """Restore the generator states that `save` wrote."""
    from safetensors.torch import load_file

    states = load_file(_file(folder))
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _file(folder: Path) -> Path:
    return folder / f"rank-{rank():05d}.safetensors"
