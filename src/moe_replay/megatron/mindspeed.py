"""Megatron-Core on Ascend NPUs: MindSpeed replaces the parts of it that are written for CUDA.

Importing `mindspeed.megatron_adaptor` patches Megatron-Core and redirects `torch.cuda` to `torch.npu`. Its changes to
routers are handled in `replay/adapters`, as Megatron-Core versions are: a `TransformerConfig` with more fields,
routers of 0.12 without a replay object, and settings under which routes cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_replay.errors import MissingExtraError


def enable(settings: Mapping[str, Any]) -> None:
    """Import MindSpeed and patch for these `TransformerConfig` settings; call before creating process groups.

    MindSpeed reads settings from its command line, which does not exist here, so its first round of patches assumes a
    single device without context parallelism.
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
