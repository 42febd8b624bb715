"""LoRA adapters (peft) in a Transformers model: added, disabled for the reference, merged for the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.train.config.sections import ModelConfig

_ADAPTER = "default"


class LoraError(MoeReplayError):
    """Adapters that cannot be added where the config asks for them."""


def add_adapters(model: Any, config: ModelConfig) -> None:
    """Freeze the model and add trainable adapters to its linear layers, in place."""
    try:
        from peft import LoraConfig
    except ImportError as missing:
        raise MissingExtraError("LoRA needs peft", remedy="pip install 'moe-replay[lora]'") from missing

    try:
        # No dropout: scoring and training must compute the same function.
        model.add_adapter(
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  only ever divided by the rank
                target_modules=list(config.lora_targets),
                lora_dropout=0.0,
            ),
            adapter_name=_ADAPTER,
        )
    except ValueError as refusal:
        raise LoraError(
            "LoRA adapters cannot be added",
            expected=f"linear layers named {', '.join(config.lora_targets)}",
            found=refusal,
            remedy="Set model.lora_targets to linear layers of this model, which routers and fused experts are not",
        ) from refusal


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Disable the adapters inside this context: the model that training started from."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def merged(tensors: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """Merge adapters into their base weights: base + scale * up @ down, under the names without adapters.

    Tensors come in the order of the model's state, where a layer's base weight stands before its adapters.
    """
    base: tuple[str, Tensor] | None = None
    down: Tensor | None = None
    for name, tensor in tensors:
        if f".lora_A.{_ADAPTER}." in name:
            down = tensor
        elif f".lora_B.{_ADAPTER}." in name:
            assert base is not None, name
            assert down is not None, name
            yield base[0], (base[1].float() + scale * (tensor.float() @ down.float())).to(base[1].dtype)
            base = down = None
        elif name.endswith(".base_layer.weight"):
            base = name.replace(".base_layer.", "."), tensor
        else:
            yield name.replace(".base_layer.", "."), tensor
