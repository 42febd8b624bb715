"""Memory check of a run on this machine before weights are loaded, by the estimates of `train/setup/memory_plan.py`."""

from __future__ import annotations

import os
from typing import Any

import torch

from moe_replay.errors import ExitStatus, LayoutError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup.memory_plan import GIB, plan_memory
from moe_replay.utils.device import accelerator
from moe_replay.weights.model_sizes import ModelSizes


class DoesNotFitError(LayoutError):
    """A run that is estimated to need more memory than this machine has."""

    exit_status = ExitStatus.CHECK_FAILED


class HostTooSmallError(DoesNotFitError):
    """A run whose weights, gradients and optimizer alone exceed host memory."""


def check_memory(config: TrainConfig, model: Any, ranks: int) -> str:
    """Return the estimated memory of a run on `ranks` ranks, on a GPU or else on the host; raise if it is too much.

    model   the config of the model
    """
    kind = config.backend.device if config.backend.device != "auto" else accelerator() or "cpu"
    sizes = ModelSizes.of(model)
    if kind == "cpu":
        return _check_host(config, sizes)
    if kind != accelerator():
        return "not checked: no such device on this machine"
    capacity = torch.get_device_module(kind).mem_get_info()[1] / GIB
    plan = plan_memory(config, sizes, gpus=ranks, gpu_gib=capacity)
    phase, peak = max(plan.totals.items(), key=lambda item: item[1])
    summary = f"{peak / GIB:.1f} of {capacity:.1f} GiB on the fullest of {ranks} GPUs, in phase '{phase}'"
    if not plan.fits:
        raise DoesNotFitError(
            "the run is estimated not to fit into GPU memory",
            expected=f"at most {capacity:.1f} GiB",
            found=f"{peak / GIB:.1f} GiB in phase '{phase}' on {ranks} GPUs",
            remedy="Use more GPUs, model.gradient_checkpointing, backend.offload with rollout.sleep, or LoRA; "
            "`moe-replay plan --recipe` lists the memory of each phase",
        )
    return summary


def _check_host(config: TrainConfig, sizes: ModelSizes) -> str:
    """Check float32 weights, gradients and AdamW moments of all ranks plus engine weights, without activations."""
    trainer, engine = _bytes_of(config, sizes)
    needed, available = trainer + (0 if config.rollout.is_server else engine), host_memory()
    summary = f"{needed / GIB:.1f} of {available / GIB:.1f} GiB of host memory for weights, gradients and optimizer"
    if needed > available:
        raise HostTooSmallError(
            "the run does not fit into host memory",
            expected=f"at most {available / GIB:.1f} GiB",
            found=f"{needed / GIB:.1f} GiB for weights, gradients, optimizer and engine, without activations",
            remedy="Train on GPUs, or try the recipe with --tiny",
        )
    return summary


def _bytes_of(config: TrainConfig, sizes: ModelSizes) -> tuple[int, int]:
    """Return the bytes of trainer weights, gradients and moments, and of engine weights."""
    return (4 if config.model.lora_rank else 16) * sizes.total, 2 * sizes.total


def bytes_on_cpus(config: TrainConfig, model: Any, ranks: int) -> tuple[float, float]:
    """Return the host memory in bytes per rank and per engine on CPUs."""
    trainer, engine = _bytes_of(config, ModelSizes.of(model))
    return trainer / ranks, engine


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def weights_memory(model: Any, dtype: str, device: str) -> tuple[int, int]:
    """Return the bytes of the weights in a dtype, and the free bytes on a device."""
    needed = ModelSizes.of(model).total * getattr(torch, dtype).itemsize
    if device == "cpu":
        return needed, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return needed, torch.get_device_module(device).mem_get_info()[0]
