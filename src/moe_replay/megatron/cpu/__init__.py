"""Megatron-Core on a CPU, for tests: every parallelism, over gloo, without a GPU or Transformer Engine.

    from moe_replay.megatron import cpu as megatron_cpu

    megatron_cpu.enable()           # or `with megatron_cpu.enabled():`, which undoes it at the end
    config = TransformerConfig(**megatron_cpu.SETTINGS, num_layers=4, ...)

Megatron-Core requires CUDA in dozens of places that do not need it. `patches.py` lists what is replaced, why, and when
each patch can be removed. Nothing is patched on import, and enabling is refused where CUDA is available.

Context parallelism, packed sequences and multi-latent attention need a core attention that Megatron-Core provides only
through Transformer Engine: `megatron/core_attention.py` has one in torch, put into a layer spec by
`use_plain_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from moe_replay.errors import MissingExtraError, ReplayStateError
from moe_replay.megatron.core_attention import PlainCoreAttention, use_plain_attention
from moe_replay.megatron.cpu.patches import PATCHES, SETTINGS, Patch

__all__ = ["PATCHES", "SETTINGS", "Patch", "PlainCoreAttention", "enable", "enabled", "use_plain_attention"]


@functools.cache
def enable() -> None:
    """Patch Megatron-Core to run on the CPU in this process."""
    _apply(ExitStack())


@contextmanager
def enabled() -> Iterator[None]:
    """Patch Megatron-Core to run on the CPU inside this context."""
    with ExitStack() as undo:
        _apply(undo)
        yield


def _apply(undo: ExitStack) -> None:
    if torch.cuda.is_available():
        raise ReplayStateError(
            "Megatron-Core is not patched for the CPU where CUDA is available",
            found=f"{torch.cuda.device_count()} devices",
            remedy="Hide the devices with CUDA_VISIBLE_DEVICES=",
        )
    for patch in PATCHES:
        try:
            patch.apply(undo)
        except ModuleNotFoundError as missing:
            undo.close()
            raise MissingExtraError(
                "Megatron-Core is not installed", found=missing, remedy="pip install 'moe-replay[megatron]'"
            ) from missing
