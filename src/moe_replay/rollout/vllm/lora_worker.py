"""LoRA in vLLM's worker processes where vLLM itself leaves something out; mixed into its workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class LoraBesideExperts:
    """LoRA on CPU, where vLLM has no kernels for experts with adapters: the others can have some all the same.

    vLLM chooses the kernels of experts by whether there is LoRA at all, so the model is loaded without it.
    """

    model_runner: Any
    vllm_config: Any

    def load_model(self, **options: Any) -> None:
        """Load the model, then add room for adapters to the modules that `lora_target_modules` names."""
        from vllm.config import set_current_vllm_config

        config, runner = self.vllm_config, self.model_runner
        adapters = config.lora_config
        config.lora_config = runner.lora_config = None
        try:
            super().load_model(**options)  # type: ignore[misc]
        finally:
            config.lora_config = runner.lora_config = adapters
        if adapters is not None:
            with set_current_vllm_config(config):
                runner.model = runner.load_lora_model(runner.model, config, runner.device)


class AdaptedRouters:
    """Routers with adapters beside experts with adapters.

    If both have room for adapters, vLLM 0.30 and 0.32 put the router with its adapter into the wrapper around the layer
    of experts, and the layer itself goes on to call the router without.
    """

    model_runner: Any
    vllm_config: Any

    def load_model(self, **options: Any) -> None:
        """Load the model, and have layers of experts call their routers with adapters; graphs are captured later."""
        super().load_model(**options)  # type: ignore[misc]
        if self.vllm_config.lora_config is not None:
            call_adapted_routers(adapted_layers(self.model_runner))


def adapted_layers(model_runner: Any) -> Mapping[str, Any]:
    """Return vLLM's layers with room for adapters, by their names."""
    return model_runner.lora_manager._adapter_manager.modules


def call_adapted_routers(layers: Mapping[str, Any]) -> None:
    """Have layers of experts with room for adapters call the routers that have room for them too."""
    for experts, name in list(_routers_passed_by(layers)):
        experts.gate = layers[name]


def routers_passed_by(layers: Mapping[str, Any]) -> set[str]:
    """Return the routers with room for adapters that a layer of experts calls without them."""
    return {name for _, name in _routers_passed_by(layers)}


def _routers_passed_by(layers: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    inside = {id(layer.base_layer): name for name, layer in layers.items()}
    for layer in layers.values():
        name = inside.get(id(getattr(layer.base_layer, "gate", None)))
        if name is not None:
            yield layer.base_layer, name
