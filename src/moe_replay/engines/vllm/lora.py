"""The policy's LoRA adapter in vLLM: start options, the folder that workers load it from, and adapted routers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_replay.engines.base import LoraSpec
from moe_replay.engines.vllm.release import on_cpu
from moe_replay.errors import EngineOptionError
from moe_replay.weights.lora_adapter import Adapter, write_adapter

ADAPTER_NAME, ADAPTER_ID = "policy", 1
EXPERTS = "experts"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has memory layouts for


def adapter_options(spec: LoraSpec) -> dict[str, Any]:
    """Return vLLM's options for one adapter; raise for one that it does not support."""
    if spec.rank > RANKS[-1]:
        raise EngineOptionError("the LoRA rank is too large for vLLM", expected=f"at most {RANKS[-1]}", found=spec.rank)
    if EXPERTS in spec.modules and on_cpu():
        raise EngineOptionError(
            "vLLM on CPU does not support LoRA adapters of experts",
            found=", ".join(spec.modules),
            remedy="Set rollout.lora = false: the engine then gets merged weights",
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= spec.rank),
        "lora_target_modules": list(spec.modules),
    }


def supported_adapters(vllm_config: Any) -> LoraSpec | None:
    """Return the largest adapter that a started vLLM takes; None: it has LoRA disabled."""
    config = vllm_config.lora_config
    return None if config is None else LoraSpec(config.max_lora_rank, tuple(config.target_modules or ()))


class AdapterSlot:
    """The adapter that requests are sampled with; none before the first update.

    folder    where adapters are written for the workers
    request   vLLM's `LoRARequest` of the current adapter
    """

    def __init__(self, folder: Path) -> None:
        self._parent = folder
        self._count = 0
        self.request: Any = None

    def write(self, adapter: Adapter, dtype: torch.dtype) -> Path:
        """Write an adapter for the workers, in the type that they compute in; the previous one stays until `use`."""
        self._count += 1
        folder = self._parent / f"adapter-{self._count}"
        tensors = ((name, tensor.to(dtype)) for name, tensor in adapter.tensors)
        write_adapter(replace(adapter, tensors=tensors), folder)
        return folder

    def use(self, folder: Path) -> None:
        """Sample with the adapter in `folder` from now on, and remove the previous one."""
        from vllm.lora.request import LoRARequest

        previous, self.request = self.request, LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(folder))
        if previous is not None:
            shutil.rmtree(previous.lora_path)


# ---- in the workers --------------------------------------------------------------------------------------------------


class AdaptedRouters:
    """Adapters of routers where experts have adapters too. Mixed into vLLM's GPU worker.

    If both are wrapped for adapters, vLLM 0.30 and 0.32 put the wrapped router into the wrapper around the MoE layer,
    and the layer itself goes on to call the router without its adapter.
    """

    model_runner: Any
    vllm_config: Any

    def load_model(self, **options: Any) -> None:
        """Load the model, and have MoE layers call the wrapped routers; CUDA graphs are captured later."""
        super().load_model(**options)  # type: ignore[misc]
        if self.vllm_config.lora_config is not None:
            call_adapted_routers(adapted_layers(self.model_runner))


def adapted_layers(model_runner: Any) -> Mapping[str, Any]:
    """Return vLLM's layers that are wrapped for adapters, by name."""
    return model_runner.lora_manager._adapter_manager.modules


def call_adapted_routers(layers: Mapping[str, Any]) -> None:
    """Have MoE layers call their routers through the wrappers."""
    for experts, name in list(_unadapted_routers(layers)):
        experts.gate = layers[name]


def unadapted_routers(layers: Mapping[str, Any]) -> set[str]:
    """Return the wrapped routers that a MoE layer calls without their adapters."""
    return {name for _, name in _unadapted_routers(layers)}


def _unadapted_routers(layers: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    names = {id(layer.base_layer): name for name, layer in layers.items()}
    for layer in layers.values():
        name = names.get(id(getattr(layer.base_layer, "gate", None)))
        if name is not None:
            yield layer.base_layer, name
