"""The accelerator of this process, whatever its name, and copies to it that do not wait for it."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.errors import MissingExtraError, MoeReplayError

EXTENSIONS = {"npu": "torch_npu"}
"""Accelerators that torch knows only after another package was imported."""


def accelerator() -> str | None:
    """Return the type of the accelerator that torch computes on here, such as cuda or npu; None if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def device_type(wanted: str = "auto") -> str:
    """Return the device type to compute on: the one asked for, or for auto the accelerator, else cpu."""
    if package := EXTENSIONS.get(wanted):
        try:
            importlib.import_module(package)
        except ImportError as missing:
            raise MissingExtraError(
                f"the device {wanted} needs {package}",
                found=missing,
                remedy=f"Install {package}, or use another device",
            ) from missing
    found = accelerator()
    if wanted == "auto":
        return found or "cpu"
    if wanted not in ("cpu", found):
        raise MoeReplayError(
            f"no device of type {wanted} is available",
            found=f"{found or 'cpu'} as torch sees it",
            remedy="Set the device to auto",
        )
    return wanted


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU computes in bfloat16. On an ARM core without it, vLLM ends with an illegal instruction."""
    if platform.machine() not in ("aarch64", "arm64") or not cpuinfo.is_file():
        return True
    return "bf16" in cpuinfo.read_text(encoding="utf-8").split()


def device_module(device: torch.device) -> Any:
    """Return torch.cuda, torch.npu and so on: what torch offers for this type of device."""
    return torch.get_device_module(device)


def collective_backends(device: torch.device) -> str:
    """Return the backends of a process group whose tensors are on the device or on the CPU: `cpu:gloo,cuda:nccl`."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of an array on a device, without synchronizing with it; on the CPU, the array itself."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def indices_to_device(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Return copies of arrays of indices on a device, int64, all in one transfer that does not synchronize."""
    flat = np.concatenate([array.ravel() for array in arrays]).astype(np.int32)
    parts = to_device(flat, device).long().split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
