"""Megatron-Core on a CPU, for tests: every parallelism, over gloo, without a GPU or Transformer Engine.

    from moe_replay.megatron import cpu as megatron_cpu

    megatron_cpu.enable()           # or `with megatron_cpu.enabled():`, which takes everything back
    config = TransformerConfig(**megatron_cpu.SETTINGS, num_layers=4, ...)

Megatron-Core asks for CUDA in some dozens of places that need none. `patches.py` lists what has to be replaced, why,
and when each entry can go. Nothing happens before it is asked for, and where CUDA is available it is refused: a run
that could be real must not be made of stand-ins.

Context parallelism, packed sequences and multi-latent attention need a core attention that Megatron-Core has only
for Transformer Engine: `attention.py` has a plain one, put into a layer spec by `use_plain_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from moe_replay.errors import MissingExtraError, ReplayStateError
from moe_replay.megatron.cpu.attention import PlainCoreAttention, use_plain_attention
from moe_replay.megatron.cpu.patches import PATCHES, SETTINGS, Patch

__all__ = ["PATCHES", "SETTINGS", "Patch", "PlainCoreAttention", "enable", "enabled", "use_plain_attention"]


@functools.cache
def enable() -> None:
    """Let Megatron-Core run on the CPU of this process, from now on."""
    _apply(ExitStack())


@contextmanager
def enabled() -> Iterator[None]:
    """Let Megatron-Core run on the CPU inside this context."""
    with ExitStack() as undo:
        _apply(undo)
        yield


def _apply(undo: ExitStack) -> None:
    if torch.cuda.is_available():
        raise ReplayStateError(
            "Megatron-Core is not run on the CPU where CUDA is available",
            found=f"{torch.cuda.device_count()} devices",
            remedy="Hide them with CUDA_VISIBLE_DEVICES= if that is what you want",
        )
    for patch in PATCHES:
        try:
            patch.apply(undo)
        except ModuleNotFoundError as missing:
            undo.close()
            raise MissingExtraError(
                "Megatron-Core is not installed", found=missing, remedy="pip install 'moe-replay[megatron]'"
            ) from missing
