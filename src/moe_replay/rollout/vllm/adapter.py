"""The policy's LoRA adapter in vLLM: the options to start with, and the folder that its workers load it from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_replay.errors import EngineOptionError
from moe_replay.rollout.adapter import Adapter, write_adapter
from moe_replay.rollout.engine import LoraSpec
from moe_replay.rollout.vllm.arguments import on_cpu
from moe_replay.rollout.vllm.worker import ADAPTER, ADAPTER_ID

EXPERTS = "experts"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has memory layouts for


def adapter_options(spec: LoraSpec) -> dict[str, Any]:
    """Return vLLM's options for one adapter; raise for one that it cannot compute with."""
    if spec.rank > RANKS[-1]:
        raise EngineOptionError(
            "vLLM does not take LoRA adapters of this rank", expected=f"at most {RANKS[-1]}", found=spec.rank
        )
    if EXPERTS in spec.modules and on_cpu():
        raise EngineOptionError(
            "vLLM on CPU cannot compute with LoRA adapters of experts",
            found=", ".join(spec.modules),
            remedy="Set rollout.lora = false: the engine then gets merged weights",
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= spec.rank),
        "lora_target_modules": list(spec.modules),
    }


def room_for_adapters(vllm_config: Any) -> LoraSpec | None:
    """Return what adapters a started vLLM can take; None: it has LoRA disabled."""
    lora = vllm_config.lora_config
    return None if lora is None else LoraSpec(lora.max_lora_rank, tuple(lora.target_modules or ()))


class AdapterSlot:
    """The adapter that requests are sampled with; none until there has been an update.

    folder   of ours, for the files that workers read
    """

    def __init__(self, folder: Path) -> None:
        self._parent = folder
        self._count = 0
        self.request: Any = None

    def write(self, adapter: Adapter) -> Path:
        """Write an adapter for the workers; the one before stays until `use`."""
        self._count += 1
        folder = self._parent / f"adapter-{self._count}"
        write_adapter(adapter, folder)
        return folder

    def use(self, folder: Path) -> None:
        """Sample with the adapter of a folder from now on, and remove the one before."""
        from vllm.lora.request import LoRARequest

        before, self.request = self.request, LoRARequest(ADAPTER, ADAPTER_ID, str(folder))
        if before is not None:
            for file in Path(before.lora_path).iterdir():
                file.unlink()
            Path(before.lora_path).rmdir()
