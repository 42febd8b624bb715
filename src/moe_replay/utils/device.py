"""The accelerator of this process (CUDA, NPU, ...), and copies to it that do not synchronize."""

from __future__ import annotations

import importlib
import inspect
import platform
from collections.abc import Callable
from functools import cache
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
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if current is None else current.type


def device_type(requested: str = "auto") -> str:
    """Return the device type to compute on: the requested one; for auto the accelerator, else cpu."""
    if package := EXTENSIONS.get(requested):
        try:
            importlib.import_module(package)
        except ImportError as missing:
            raise MissingExtraError(
                f"the device {requested} needs {package}",
                found=missing,
                remedy=f"Install {package}, or use another device",
            ) from missing
    present = accelerator()
    if requested == "auto":
        return present or "cpu"
    if requested not in ("cpu", present):
        raise MoeReplayError(
            f"no device of type {requested} is available",
            found=f"{present or 'cpu'} as torch sees it",
            remedy="Set the device to auto",
        )
    return requested


PEAK_TFLOPS = {
    "B200": (2250.0, 75.0),
    "H200": (989.5, 67.0),
    "H20": (148.0, 44.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.5, 67.0),
    "H800": (989.5, 67.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "RTX 4090": (165.2, 82.6),
    "MI300X": (1307.4, 163.4),
}
"""Part of a device's name -> dense TFLOP/s by its data sheet, in bfloat16 or float16, and in float32 without TF32."""


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return what a GPU computes at best in a dtype; None for a CPU and for devices that are not listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    half, single = next((peaks for part, peaks in PEAK_TFLOPS.items() if part in name), (None, None))
    return single if dtype == torch.float32 else half


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU computes in bfloat16. On an ARM core without it, vLLM ends with an illegal instruction."""
    if platform.machine() not in ("aarch64", "arm64") or not cpuinfo.is_file():
        return True
    return "bf16" in cpuinfo.read_text(encoding="utf-8").split()


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """Return torch's flash attention over sequences of different lengths; None before 2.11, where it has no windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


@cache
def varlen_shares_heads() -> bool:
    """Whether `varlen_kernel` takes fewer heads of keys than of queries."""
    kernel = varlen_kernel()
    return kernel is not None and "enable_gqa" in inspect.signature(kernel).parameters


def device_module(device: torch.device) -> Any:
    """Return torch.cuda, torch.npu and so on: torch's module for this type of device."""
    return torch.get_device_module(device)


def collective_backends(device: torch.device) -> str:
    """Return the backends of a process group whose tensors are on the device or on the CPU: `cpu:gloo,cuda:nccl`."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a copy of an array on a device, without synchronizing with it; on the CPU, the array itself.

    From page-locked memory: a longer copy from other memory waits for all that the device has been given before.
    """
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def read_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Copy a tensor to the host without waiting for its device; return what waits for the copy alone and returns it."""
    if tensor.device.type != "cuda":
        return tensor.cpu
    copy, copied = tensor.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return copy

    return read


def indices_to_device(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Return copies of arrays of indices on a device, int64, all in one transfer that does not synchronize."""
    flat = np.concatenate([array.ravel() for array in arrays]).astype(np.int32)
    parts = to_device(flat, device).long().split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
