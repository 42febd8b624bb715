"""Copies to a device that do not wait for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of an array on a device, without synchronizing with it; on the CPU, the array itself."""
    return torch.from_numpy(array).to(device, non_blocking=True)
