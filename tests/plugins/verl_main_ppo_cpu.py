"""What `verl.trainer.main_ppo` lacks on a machine without a GPU; nothing of routes.

VERL_USE_EXTERNAL_MODULES=tests.plugins.verl_main_ppo_cpu has verl import this in each of its processes, vLLM's workers
included.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

from moe_replay.integrations.hosts import after_import


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """Chosen by VERL_PLATFORM=cpu. Ray counts GPUs as a plain resource, of which it is told that there is one."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: torch.cpu)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None: ...

    def synchronize(self, device_index: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False  # weights go to vLLM through shared memory

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()


for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
    setattr(torch.cpu, _name, lambda *_: 0)
torch.cpu.mem_get_info = lambda *_: (0, 0)  # type: ignore[attr-defined]


_init_process_group = torch.distributed.init_process_group


def _init_with_one_backend(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """verl asks for one backend for the CPU and one for its device, which torch refuses where both are the same."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _init_with_one_backend


def reload_packed_weights(module: ModuleType) -> None:
    """On a CPU vLLM packs weights where its loaders would write: let its own reload unpack them for verl's update."""
    extension = module.vLLMColocateWorkerExtension
    original = extension.update_weights_from_ipc
    original_bucket = extension._update_weights

    def _update_weights(self: Any, weights: list[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        # verl copies them out of shared memory by `.to(device)`, which copies nothing on a CPU; the reload keeps them.
        original_bucket(self, [(name, tensor.clone()) for name, tensor in weights], *args, **kwargs)

    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import utils
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        from moe_replay.engines.vllm.cpu import forget_packed_experts

        process = utils.process_weights_after_loading
        utils.process_weights_after_loading = lambda model, config, device: finalize_layerwise_reload(model, config)
        try:
            with set_current_vllm_config(self.vllm_config):
                forget_packed_experts(self.model_runner.model)
                initialize_layerwise_reload(self.model_runner.model)
                original(self, *args, **kwargs)
        finally:
            utils.process_weights_after_loading = process

    extension._update_weights = _update_weights
    extension.update_weights_from_ipc = update_weights_from_ipc


after_import("verl.workers.rollout.vllm_rollout.utils", f"{__name__}:reload_packed_weights")
