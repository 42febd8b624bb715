"""What runs inside each of vLLM's worker processes: loading new weights in place, chunk by chunk.

vLLM mixes this class into its worker (`worker_extension_cls`) and calls the methods by name. They answer with text
rather than raise: what a worker raises arrives as a bare `Exception` without its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FINE = ""


class WeightUpdates:
    """Replaces the weights of a running model by `begin`, any number of `load`, and `finish`."""

    model_runner: Any  # vLLM's
    vllm_config: Any
    replay_updating: bool = False

    def replay_allow_amx(self) -> str:
        """Ask the kernel for the matrix registers, which vLLM's attention for bfloat16 uses without asking.

        Where no other kernel of the process has asked before, that is an illegal instruction, and the worker dies.
        """
        torch.cpu._init_amx()
        return FINE

    def replay_begin_update(self) -> str:
        """The weights are taken apart; nothing can be sampled until `finish`."""
        return _in_words(self._replay_begin_update)

    def replay_load(self, file: str) -> str:
        """Load the tensors of one safetensors file, under their names in the checkpoint."""
        return _in_words(lambda: self._replay_load(file))

    def replay_finish_update(self) -> str:
        """Bring all weights into the layout of the kernels; text if some have not come."""
        return _in_words(self._replay_finish_update)

    def _replay_begin_update(self) -> str:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.replay_updating:
            self._replay_finish_update()  # of an update that broke off: what it left is written over now
        model = self.model_runner.get_model()
        _forget_packed_experts(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        self.replay_updating = True
        return FINE

    def _replay_load(self, file: str) -> str:
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config

        if not self.replay_updating:
            return "no update has begun"
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.device(self.model_runner.device):
            model.load_weights(iter(load_file(file).items()))
        return FINE

    def _replay_finish_update(self) -> str:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self.replay_updating:
            return "no update has begun"
        model = self.model_runner.get_model()
        missing, tied = _unloaded(model)
        with set_current_vllm_config(self.vllm_config), torch.device(self.model_runner.device):
            finalize_layerwise_reload(model, self.model_runner.model_config)
            for name in tied:
                module: Any = model.get_submodule(name)
                module.quant_method.process_weights_after_loading(module)  # on CPU it computes with a packed copy
        self.replay_updating = False
        return f"weights of {len(missing)} modules missing, among them {', '.join(missing[:3])}" if missing else FINE


def _unloaded(model: torch.nn.Module) -> tuple[list[str], list[str]]:
    """Modules that have not got all of their weights, and those that got them through a module they are tied to.

    vLLM would keep the old weights of the former, or leave holes in them, and go on.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    incomplete: dict[str, set[int]] = {}  # module -> where its weights lie
    complete: set[int] = set()
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        own = list(module.parameters(recurse=False))
        if is_deferred_attention_layer(module) or not own:  # scales that no checkpoint has; nothing to load
            continue
        if info.kernel_tensors is None:  # whole already
            complete |= {parameter.data_ptr() for parameter in own}
            continue
        wanted = sum(parameter.numel() for parameter in own)
        if "num_embeddings_padded" in vars(module):  # has rows for tokens that no checkpoint has
            wanted = 1
        memory = {parameter.data_ptr() for parameter in info.kernel_tensors[0].values()}
        if info.load_numel < wanted:
            incomplete[name] = memory
        else:
            complete |= memory
    tied = [name for name, memory in incomplete.items() if memory <= complete]  # an output head to the embedding
    return [name for name in incomplete if name not in tied], tied


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """Make vLLM pack the experts anew on CPU, where it does so only when it builds their kernel.

    Left alone it copies unpacked weights into packed memory: the right shape, and garbage in every expert.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


def _in_words(work: Callable[[], str]) -> str:
    """What `work` answers; where it fails for a reason that lies in the weights or the model, that reason."""
    from safetensors import SafetensorError

    wrong = (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
    try:
        return work()
    except (*wrong, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"
