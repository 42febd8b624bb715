"""The states of the random generators of a rank: torch on CPU and, if it has one, its accelerator; numpy; Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_replay.distributed.ranks import rank
from moe_replay.utils.device import device_module
from moe_replay.utils.files import Write, apply_umask


def seed(number: int) -> None:
    """Seed every generator of this process, so that what a run draws does not depend on what ran before."""
    torch.manual_seed(number)  # of all devices
    np.random.seed(number % 2**32)
    random.seed(number)


def stage(device: torch.device) -> Write:
    """Copy the generator states of this rank, and return what writes them to its own file."""
    states = {"cpu": torch.get_rng_state(), **_python_states()}
    if device.type != "cpu":
        states[device.type] = device_module(device).get_rng_state(device)
    number = rank()
    return lambda folder: _write(_file(folder, number), states)


def _write(path: Path, states: dict[str, Tensor]) -> list[Path]:
    from safetensors.torch import save_file

    save_file(states, path)
    apply_umask(path)
    return [path]


def load(folder: Path, device: torch.device) -> None:
    """Restore the generator states that were saved; ranks beyond those that saved get their own streams."""
    from safetensors.torch import load_file

    saved = len(list(folder.glob("rank-*.safetensors")))
    states = load_file(_file(folder, rank() % max(saved, 1)))
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu":
        device_module(device).set_rng_state(states[device.type], device)
    _restore_python(states)
    if rank() >= saved:
        seed(int(torch.randint(2**62, ())) + rank())


def _python_states() -> dict[str, Tensor]:
    """Return the states of numpy's global generator and of Python's: integers, and a spare normal number if any."""
    of_numpy: Any = np.random.get_state(legacy=True)
    _, keys, position, has_spare, spare = of_numpy
    version, numbers, next_normal = random.getstate()
    return {
        "numpy": torch.tensor([*keys.tolist(), position, has_spare], dtype=torch.int64),
        "numpy_spare": torch.tensor([spare], dtype=torch.float64),
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_spare": torch.tensor([] if next_normal is None else [next_normal], dtype=torch.float64),
    }


def _restore_python(states: dict[str, Tensor]) -> None:
    *keys, position, has_spare = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_spare, float(states["numpy_spare"])))
    version, *numbers = states["python"].tolist()
    random.setstate((version, tuple(numbers), next(iter(states["python_spare"].tolist()), None)))


def _file(folder: Path, number: int) -> Path:
    return folder / f"rank-{number:05d}.safetensors"
