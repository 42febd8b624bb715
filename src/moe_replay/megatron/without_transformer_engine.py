"""Megatron-Core where Transformer Engine is not installed, on a GPU as well as on a CPU."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from importlib.util import find_spec

from moe_replay.megatron.cpu.patches import TRANSFORMER_ENGINE_PATCHES


@functools.cache
def enable() -> None:
    """Patch what Megatron-Core reads from Transformer Engine where it is missing; do nothing if it is installed."""
    if find_spec("transformer_engine") is None:
        for patch in TRANSFORMER_ENGINE_PATCHES:
            patch.apply(ExitStack())
