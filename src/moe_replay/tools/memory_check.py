"""Whether a run fits into the memory of this machine, before weights are loaded. Estimates: see `plan/memory.py`."""

from __future__ import annotations

import os
from typing import Any

import torch

from moe_replay.errors import ExitStatus, LayoutError
from moe_replay.tools.plan.memory import GIB, plan_memory
from moe_replay.tools.plan.sizes import ModelSizes
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.device import accelerator


class DoesNotFitError(LayoutError):
    """A run that needs more memory than this machine has, by what is known before it starts."""

    exit_status = ExitStatus.CHECK_FAILED


class HostTooSmallError(DoesNotFitError):
    """A run whose weights, gradients and optimizer alone exceed host memory."""


def check_memory(config: TrainConfig, model: Any, ranks: int) -> str:
    """Return what a run on `ranks` ranks will hold on a GPU, or in host memory without one; raise if that is too much.

    model   the config of the model
    """
    kind = config.backend.device if config.backend.device != "auto" else accelerator() or "cpu"
    sizes = ModelSizes.of(model)
    if kind == "cpu":
        return _check_host(config, sizes)
    if kind != accelerator():
        return "not checked: this machine has no such device"
    capacity = torch.get_device_module(kind).mem_get_info()[1] / GIB
    plan = plan_memory(config, sizes, gpus=ranks, gpu_gib=capacity)
    phase, most = max(plan.totals.items(), key=lambda item: item[1])
    told = f"{most / GIB:.1f} of {capacity:.1f} GiB on the fullest of {ranks} GPUs, in the phase '{phase}'"
    if not plan.fits:
        raise DoesNotFitError(
            "the run does not fit into the memory of a GPU, by estimate",
            expected=f"at most {capacity:.1f} GiB",
            found=f"{most / GIB:.1f} GiB in the phase '{phase}' on {ranks} GPUs",
            remedy="Use more GPUs, model.gradient_checkpointing, backend.offload with rollout.sleep, or LoRA; "
            "`moe-replay plan --recipe` lists what is held in each phase",
        )
    return told


def _check_host(config: TrainConfig, sizes: ModelSizes) -> str:
    """Weights in float32, gradients and AdamW's moments of all ranks, and the engine's weights, without activations."""
    trainer, engine = _bytes_of(config, sizes)
    needed, there = trainer + (0 if config.rollout.is_server else engine), host_memory()
    told = f"{needed / GIB:.1f} of {there / GIB:.1f} GiB of host memory for weights, gradients and optimizer"
    if needed > there:
        raise HostTooSmallError(
            "the run does not fit into host memory",
            expected=f"at most {there / GIB:.1f} GiB",
            found=f"{needed / GIB:.1f} GiB for weights, gradients, optimizer and engine, without activations",
            remedy="Train on GPUs, or try the recipe with --tiny",
        )
    return told


def _bytes_of(config: TrainConfig, sizes: ModelSizes) -> tuple[int, int]:
    """Return the bytes of the trainer's weights, gradients and moments, and of an engine's weights."""
    return (4 if config.model.lora_rank else 16) * sizes.total, 2 * sizes.total


def bytes_on_cpus(config: TrainConfig, model: Any, ranks: int) -> tuple[float, float]:
    """Return the bytes of host memory of one of `ranks` ranks, and of one engine, that compute on CPUs."""
    trainer, engine = _bytes_of(config, ModelSizes.of(model))
    return trainer / ranks, engine


def host_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def weights_memory(model: Any, dtype: str, device: str) -> tuple[int, int]:
    """Return the bytes of a model's weights in a type, and the bytes that are free for them on a device."""
    needed = ModelSizes.of(model).total * getattr(torch, dtype).itemsize
    if device == "cpu":
        return needed, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return needed, torch.get_device_module(device).mem_get_info()[0]
