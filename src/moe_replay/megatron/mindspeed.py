"""Megatron-Core on Ascend NPUs: MindSpeed replaces the parts of it that are written for CUDA.

Importing `mindspeed.megatron_adaptor` patches Megatron-Core and redirects `torch.cuda` to `torch.npu`. What it changes
of routers is handled where versions of Megatron-Core are (`replay/adapters`): a `TransformerConfig` that it rebuilds
with more fields, routers of 0.12 without a replay object, and settings under which routes cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_replay.errors import MissingExtraError


def enable(settings: Mapping[str, Any]) -> None:
    """Import MindSpeed and have it patch for these settings of a `TransformerConfig`; before process groups are made.

    MindSpeed reads its settings from its own command line, which does not exist here: its first round of
    patches is that of a single device, without context parallelism.
    """
    try:
        from mindspeed.megatron_adaptor import repatch
    except ImportError as missing:
        raise MissingExtraError(
            "Megatron-Core on an NPU needs MindSpeed",
            found=missing,
            remedy="Install mindspeed for your version of Megatron-Core, or set backend.kind = 'fsdp'",
        ) from missing
    repatch({name: value for name, value in settings.items() if value is not None})
