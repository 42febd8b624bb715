"""The share of a GPU's memory that vLLM gets beside a trainer, and what is said if it does not start."""

from __future__ import annotations

import sys

import torch

from moe_replay.errors import EngineError
from moe_replay.rollout.engine import StartRequest
from moe_replay.utils.device import accelerator, device_module
from moe_replay.utils.units import GIB

MOST = 0.92
"""What vLLM takes by default, where nothing else is on the GPU."""
LEAST = 0.05
MARGIN = GIB
"""Left for buffers of other processes."""
SET_IT = "rollout.options.gpu_memory_utilization"


def memory_share(request: StartRequest) -> float | None:
    """Return the share of this GPU for vLLM beside the trainer in this process, and say it; None: vLLM's own default.

    It is computed where the options name neither a share nor a size of the KV cache, and this process uses the GPU.
    """
    if {"gpu_memory_utilization", "kv_cache_memory_bytes"} & request.options.keys():
        return None
    kind = accelerator()
    if kind is None or not (gpu := device_module(torch.device(kind))).is_initialized():
        return None
    free, total = gpu.mem_get_info()
    share, left = share_of(free, total, gpu.memory_allocated(), sleeps=request.sleep)
    print(
        f"vLLM: {share:.2f} of the GPU's memory: {free / GIB:.1f} of {total / GIB:.1f} GiB are free, "
        f"{left / GIB:.1f} of them are left to the trainer ({SET_IT} sets another share)",
        file=sys.stderr,
        flush=True,
    )
    return share


def share_of(free: int, total: int, held: int, *, sleeps: bool) -> tuple[float, int]:
    """Return vLLM's share of a GPU, and the bytes that are left to the trainer.

    held     bytes that the trainer has allocated: its weights
    sleeps   the engine frees its memory while the trainer works; otherwise gradients and optimizer state, three times
             the weights, and a tenth of the GPU for activations are left to the trainer
    """
    left = MARGIN if sleeps or not held else MARGIN + 3 * held + total // 10
    share = min((free - left) / total, MOST)
    if share < LEAST:
        raise EngineError(
            "there is no room for vLLM beside the trainer",
            expected=f"at least {LEAST:.0%} of {total / GIB:.1f} GiB",
            found=f"{free / GIB:.1f} GiB free, of which the trainer will need {left / GIB:.1f}",
            remedy=f"Set rollout.sleep = true and backend.offload = true, use a server, or set {SET_IT}",
        )
    return int(share * 100) / 100, left


def not_started(engine: str, cause: str) -> EngineError:
    """Return the error for an engine that did not start, which ends with the cause that vLLM names."""
    remedy = f"Set {SET_IT} lower, or free memory of the GPU: " if "memory utilization" in cause else ""
    return EngineError(f"{engine} did not start with routes. {remedy}{cause}")
