"""Patches for Megatron-Core's local layers and for machines without Transformer Engine, on GPUs as well as on CPUs.

Each patch says which upstream line needs it and when it can be removed. Line numbers are those of megatron-core 0.16.1;
0.12.1 to 0.15.3 run with the same patches. Nothing is patched on import.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch


@functools.cache
def enable() -> None:
    """Apply the patches; if Transformer Engine is installed, only those that local layers need beside it."""
    installed = find_spec("transformer_engine") is not None
    for patch in TRANSFORMER_ENGINE_PATCHES:
        if patch.for_local_layers or not installed:
            patch.apply(ExitStack())


class Patch(NamedTuple):
    """One patch."""

    name: str
    upstream: str  # file and line that need it
    until: str  # when it can be removed
    apply: Callable[[ExitStack], None]  # applies the patch and registers its undo
    for_local_layers: bool = False  # needed by layers that do without Transformer Engine, installed or not


def replace_attribute(undo: ExitStack, owner: ModuleType | type, name: str, value: object) -> None:
    attributes = vars(owner)
    if name in attributes:
        undo.callback(setattr, owner, name, attributes[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _gating_without_te(undo: ExitStack) -> None:
    from megatron.core.transformer.moe import moe_utils

    if "te_general_gemm" not in vars(moe_utils):
        replace_attribute(undo, moe_utils, "te_general_gemm", None)


def _checkpoint_without_fp8(undo: ExitStack) -> None:
    from megatron.core.tensor_parallel import random

    kind = getattr(random, "CheckpointWithoutOutput", None)
    if kind is None or "fp8" not in inspect.signature(kind.__init__).parameters:
        return
    native = kind.__init__
    replace_attribute(undo, kind, "__init__", lambda self, fp8=None: native(self, fp8 or None))


def _latent_attention_without_te(undo: ExitStack) -> None:
    from megatron.core.transformer import multi_latent_attention

    if "HAVE_TE" in vars(multi_latent_attention):
        replace_attribute(undo, multi_latent_attention, "HAVE_TE", False)


def _norm_of_a_sequence_shard(undo: ExitStack) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    native = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sharded = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = native(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sharded
        for parameter in norm.parameters():
            parameter.sequence_parallel = sharded  # its gradient is summed over the tensor-parallel ranks
        return norm

    replace_attribute(undo, WrappedTorchNorm, "__new__", staticmethod(new))


TRANSFORMER_ENGINE_PATCHES = (
    Patch(
        "gating without Transformer Engine",
        "moe_utils.py:34 binds te_general_gemm only if Transformer Engine imports; :1192 reads it always",
        "when the name is bound to None in the except branch",
        _gating_without_te,
    ),
    Patch(
        "checkpoint without fp8",
        "tensor_parallel/random.py:636 `self.fp8 = fp8 is not None` is true for the default False",
        "when the comparison is fixed",
        _checkpoint_without_fp8,
    ),
    Patch(
        "latent attention without Transformer Engine",
        "multi_latent_attention.py:62 sets HAVE_TE although its classes are None",
        "when HAVE_TE is False without its classes",
        _latent_attention_without_te,
    ),
    Patch(
        "norm of a sequence shard",
        "torch_norm.py:32 refuses sequence parallelism; the norm is token-wise and needs a mark on its weight only",
        "when WrappedTorchNorm sets parameter.sequence_parallel itself",
        _norm_of_a_sequence_shard,
        for_local_layers=True,
    ),
)
