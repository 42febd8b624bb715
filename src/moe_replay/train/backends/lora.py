"""LoRA adapters (PEFT) in a Transformers model: target modules, adding, disabling, merging, export."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_replay.errors import MoeReplayError, needs_extra
from moe_replay.replay.adapters.transformers import router_numbers
from moe_replay.routes.router_families import load_router_family
from moe_replay.train.config.sections import ModelConfig
from moe_replay.weights.checkpoint import CheckpointForm
from moe_replay.weights.lora_adapter import PREFIX, module_names
from moe_replay.weights.model_folder import build_model
from moe_replay.weights.model_sizes import FUSED

ALL_LINEAR = "all-linear"
ROUTER = "router"
_WHOLE = ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"})
"""All projections of an expert, by the names of one model or another."""
_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))
_INSIDE_EXPERTS = re.compile(r"\.experts\.\d+\.")
_INSIDE_ROUTERS = ("gate", "router", "classifier")


class LoraError(MoeReplayError):
    """Adapters cannot be added to the configured modules."""


class Targets(NamedTuple):
    """Full names of linear layers, and of parameters of other modules: fused experts (E, out, in), router weights."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def has_whole_experts(self) -> bool:
        """Whether all projections of the experts are adapted, or none."""
        leaves = {_leaf(name) for name in self.modules if _INSIDE_EXPERTS.search(name)}
        leaves |= {_leaf(name) for name in self.parameters if _leaf(name.rpartition(".")[0]) == "experts"}
        return not leaves or any(whole <= leaves for whole in _WHOLE)

    @property
    def engine_modules(self) -> tuple[str, ...]:
        """Last names of the modules that an engine adapts; all experts of a layer are one module."""
        owners = [name.rpartition(".")[0] for name in self.parameters]
        experts = ["experts"] if any(_INSIDE_EXPERTS.search(name) for name in self.modules) else []
        modules = [name for name in self.modules if not _INSIDE_EXPERTS.search(name)]
        return tuple(sorted({*map(_leaf, [*modules, *owners]), *experts}))


def find_targets(model: Any, names: Sequence[str], router_family: str | None = None) -> Targets:
    """Return what `names` mean in a model; a name that matches nothing is an error."""
    routers = set(_router_weights(model, router_family))
    linear = {name for name, module in _inside_layers(model) if isinstance(module, nn.Linear)}
    fused = {
        f"{name}.{parameter}"
        for name, module in _inside_layers(model)
        for parameter, tensor in module.named_parameters(recurse=False)
        if tensor.ndim == 3
    }
    known = {_leaf(name) for name in linear | fused} | {_router_leaf(name) for name in routers}
    known |= {name for name, whole in FUSED.items() if whole in known and any(_leaf(path) == whole for path in fused)}
    targets: set[str] = set()
    for name in names:
        if name == ROUTER and routers:
            matching = routers
        elif name == ALL_LINEAR:
            matching = (linear | fused) - routers
        else:
            matching = {path for path in linear if _leaf(path) == name}
            matching |= {path for path in fused if _leaf(path) == FUSED.get(name, name)}
            matching |= {path for path in routers if _router_leaf(path) == name}
        if not matching:
            raise LoraError(
                "model.lora_target_modules: no layer of this model has this name",
                expected=f"some of {', '.join(sorted({*known, ROUTER} if routers else known))}, or {ALL_LINEAR}",
                found=repr(name),
            )
        targets |= matching
    for both in _HALVES:
        present = [name for name in both if name in names]
        if len(present) == 1 and not {ALL_LINEAR, "gate_up_proj"} & {*names} and "gate_up_proj" in map(_leaf, fused):
            raise LoraError(
                f"model.lora_target_modules: {both[0]} and {both[1]} of an expert are one tensor in this model",
                expected="both or none of them",
                found=repr(present[0]),
            )
    return Targets(tuple(sorted(targets & linear)), tuple(sorted(targets - linear)))


def targets_of(settings: Any, config: ModelConfig) -> Targets:
    """Return what `model.lora_target_modules` mean in the model of a Transformers config, which is not loaded."""
    with torch.device("meta"):
        model = build_model(settings, trust_remote_code=config.trust_remote_code)
    return find_targets(model, config.lora_target_modules, config.router_family)


def _router_weights(model: Any, router_family: str | None) -> Iterator[str]:
    """Yield the weight of each router that is a bare parameter, and the router that is a linear layer."""
    modules = dict(model.named_modules())
    family = load_router_family(router_family)
    for name in router_numbers(modules, () if family is None else family.routers):
        if any(parameter == "weight" for parameter, _ in modules[name].named_parameters(recurse=False)):
            yield name if isinstance(modules[name], nn.Linear) else f"{name}.weight"
            continue
        for inner in _INSIDE_ROUTERS:
            child = modules.get(f"{name}.{inner}")
            if child is not None and getattr(child, "weight", None) is not None:
                yield f"{name}.{inner}" if isinstance(child, nn.Linear) else f"{name}.{inner}.weight"


def _inside_layers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside decoder layers: embeddings and the output projection are trained whole or not at all."""
    kinds = set(model._no_split_modules or ())
    layers = tuple(f"{name}." for name, module in model.named_modules() if type(module).__name__ in kinds)
    return ((name, module) for name, module in model.named_modules() if name.startswith(layers))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _router_leaf(name: str) -> str:
    return _leaf(name.removesuffix(".weight"))


_ADAPTER = "default"
Gather = Callable[[Tensor], Tensor]
"""Shard of this rank -> the whole tensor; a collective call."""


def add_adapters(model: Any, config: ModelConfig) -> None:
    """Freeze the model and add trainable adapters to linear layers, fused experts and routers, in place."""
    with needs_extra("LoRA needs peft", "lora"):
        from peft import LoraConfig, inject_adapter_in_model

    targets = find_targets(model, config.lora_target_modules, config.router_family)
    # Without a config around it, peft takes the targets as they are: it would leave out dense layers next to experts.
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
            expected=f"layers named {', '.join(config.lora_target_modules)}",
            found=refusal,
            remedy="Set model.lora_target_modules to other layers",
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

    def merged(self, weight: Tensor, down: Tensor, up: Tensor, scale: float, experts: range | None = None) -> Tensor:
        """Return the weight with its adapter; `experts`: those that the weight has, None for all."""
        if self.num_experts == 1:
            return weight.float() + scale * (up.float() @ down.float())
        a, b = self.factors(down.float(), up.float())
        if experts is not None:
            a, b = a[experts.start : experts.stop], b[experts.start : experts.stop]
        delta = torch.bmm(b, a)
        return weight.float() + scale * (delta.transpose(1, 2) if self.transposed else delta)


def adapted_weights(model: nn.Module) -> tuple[AdaptedWeight, ...]:
    """Return all weights with adapters, in the order of the model's modules."""
    from peft.tuners.lora import LoraLayer, ParamWrapper

    adapted = []
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
        adapted.append(
            AdaptedWeight(
                plain=f"{plain_name(name)}.{parameter}",
                weight=f"{name}.{inside}.{parameter}",
                down=f"{name}.lora_A.{_ADAPTER}.weight",
                up=f"{name}.lora_B.{_ADAPTER}.weight",
                num_experts=num_experts,
                transposed=transposed,
            )
        )
    return tuple(adapted)


def plain_name(name: str) -> str:
    """Return the name of a module or tensor in the model without adapters."""
    return name.replace(".base_layer", "")


def adapter_state(
    model: nn.Module, state: Mapping[str, Tensor], adapted: tuple[AdaptedWeight, ...], gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole adapter in float32 under PEFT's names: of each expert, if the checkpoint has a tensor of each."""
    fused, form = fused_parameters(model, adapted), CheckpointForm(model)
    for weight in adapted:
        down, up = gather(state[weight.down].detach()), gather(state[weight.up].detach())
        a, b = weight.factors(down.float(), up.float())
        if weight.plain in fused:
            yield PREFIX + weight.down.replace(f".{_ADAPTER}.", "."), down.float()
            yield PREFIX + weight.up.replace(f".{_ADAPTER}.", "."), up.float()
            continue
        if weight.num_experts == 1:
            a, b = a[0], b[0]
        ups = form.tensors(weight.plain, b)
        # A tensor that the checkpoint splits along its output has one `lora_A` for all parts.
        repeats = len(ups) // weight.num_experts
        downs = form.tensors(weight.plain, torch.cat([a] * repeats, dim=-2))
        for name in ups:
            name_a, name_b = module_names(name)
            yield name_a, downs[name]
            yield name_b, ups[name]


def fused_parameters(model: nn.Module, adapted: tuple[AdaptedWeight, ...]) -> tuple[str, ...]:
    """Return the names of fused experts that the checkpoint keeps fused."""
    fused, form = [], CheckpointForm(model)
    for weight in adapted:
        shape = (weight.num_experts, 2, 2)  # the least that can be split
        if weight.num_experts > 1 and len(form.tensors(weight.plain, torch.empty(shape))) == 1:
            fused.append(weight.plain)
    return tuple(fused)
