"""LoRA adapters (peft) in a Transformers model: added, disabled for the reference, merged, or read by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_replay.errors import MissingExtraError
from moe_replay.rollout.adapter import PREFIX, module_names
from moe_replay.rollout.weights.checkpoint import CheckpointForm
from moe_replay.train.backends.lora_targets import LoraError, find_targets
from moe_replay.train.config.sections import ModelConfig

_ADAPTER = "default"
Gather = Callable[[Tensor], Tensor]
"""Shard of this rank -> the whole tensor; a collective call."""


def add_adapters(model: Any, config: ModelConfig) -> None:
    """Freeze the model and add trainable adapters to linear layers, fused experts and routers, in place."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as missing:
        raise MissingExtraError("LoRA needs peft", remedy="pip install 'moe-replay[lora]'") from missing

    targets = find_targets(model, config.lora_targets, config.router_family)
    # Without a config around it, peft takes the targets as they are: it would leave out dense layers beside experts.
    holder = nn.Module()
    holder.model = model
    try:
        # No dropout: scoring and training must compute the same function.
        inject_adapter_in_model(
            LoraConfig(
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  only ever divided by the rank
                target_modules=[f"model.{name}" for name in targets.modules],
                target_parameters=[f"model.{name}" for name in targets.parameters] or None,
                lora_dropout=0.0,
            ),
            holder,
            _ADAPTER,
        )
    except ValueError as refusal:
        raise LoraError(
            "LoRA adapters cannot be added",
            expected=f"layers named {', '.join(config.lora_targets)}",
            found=refusal,
            remedy="Set model.lora_targets to other layers",
        ) from refusal


def initialized(model: nn.Module, seed: int) -> nn.Module:
    """Give the adapters of a model on the `meta` device memory on the host and first values, as peft draws them."""
    from peft.tuners.lora import LoraLayer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.lora_A.to_empty(device="cpu")
                module.lora_B.to_empty(device="cpu")
                module.reset_lora_parameters(_ADAPTER, True)
    return model


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside this context: the model that training started from."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


class AdaptedWeight(NamedTuple):
    """A weight with an adapter, by the names of its tensors in the model's state.

    plain        name of the weight in the model without adapters
    num_experts  1 for a matrix; more: a weight (E, out, in), whose adapter is stored as (E r, in) and (out, r E)
    transposed   the weight is (E, in, out)
    """

    plain: str
    weight: str
    down: str
    up: str
    num_experts: int
    transposed: bool

    def factors(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices of each expert: (E, r, in) and (E, out, r)."""
        count = self.num_experts
        return down.reshape(count, -1, down.shape[-1]), up.reshape(up.shape[0], -1, count).permute(2, 0, 1)

    def merged(self, weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """Return weight + scale * up @ down, in float32."""
        if self.num_experts == 1:
            return weight.float() + scale * (up.float() @ down.float())
        a, b = self.factors(down.float(), up.float())
        delta = torch.bmm(b, a)
        return weight.float() + scale * (delta.transpose(1, 2) if self.transposed else delta)


def adapted_weights(model: nn.Module) -> tuple[AdaptedWeight, ...]:
    """Return all weights with adapters, in the order of the model's modules."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    found = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        parameter, inside = "weight", "base_layer"
        num_experts, transposed = 1, False
        if isinstance(module, ParamWrapper):
            parameter, num_experts = module.parameter_name, module.num_experts
            transposed = num_experts > 1 and not module._did_swap_in_out_features
            inner = module.base_layer
            while isinstance(inner, ParamWrapper):
                inner, inside = inner.base_layer, f"{inside}.base_layer"
        found.append(
            AdaptedWeight(
                plain=f"{plain_name(name)}.{parameter}",
                weight=f"{name}.{inside}.{parameter}",
                down=f"{name}.lora_A.{_ADAPTER}.weight",
                up=f"{name}.lora_B.{_ADAPTER}.weight",
                num_experts=num_experts,
                transposed=transposed,
            )
        )
    return tuple(found)


def plain_name(name: str) -> str:
    """Return the name of a module or tensor in the model without adapters."""
    return name.replace(".base_layer", "")


def adapter_state(
    model: nn.Module, state: Mapping[str, Tensor], adapted: tuple[AdaptedWeight, ...], gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole adapter in float32 under PEFT's names: of each expert, if the checkpoint has a tensor of each."""
    fused, form = fused_parameters(model, adapted), CheckpointForm(model)
    for one in adapted:
        down, up = gather(state[one.down].detach()), gather(state[one.up].detach())
        a, b = one.factors(down.float(), up.float())
        if one.plain in fused:
            yield PREFIX + one.down.replace(f".{_ADAPTER}.", "."), down.float()
            yield PREFIX + one.up.replace(f".{_ADAPTER}.", "."), up.float()
            continue
        if one.num_experts == 1:
            a, b = a[0], b[0]
        ups = form.tensors(one.plain, b)
        # A tensor that the checkpoint splits along its output has one `lora_A` for all parts.
        repeats = len(ups) // one.num_experts
        downs = form.tensors(one.plain, torch.cat([a] * repeats, dim=-2))
        for name in ups:
            name_a, name_b = module_names(name)
            yield name_a, downs[name]
            yield name_b, ups[name]


def fused_parameters(model: nn.Module, adapted: tuple[AdaptedWeight, ...]) -> tuple[str, ...]:
    """Return the names of fused experts that the checkpoint keeps fused."""
    fused, form = [], CheckpointForm(model)
    for one in adapted:
        shape = (one.num_experts, 2, 2)  # the least that can be split
        if one.num_experts > 1 and len(form.tensors(one.plain, torch.empty(shape))) == 1:
            fused.append(one.plain)
    return tuple(fused)
