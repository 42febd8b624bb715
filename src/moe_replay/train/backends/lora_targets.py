"""Which weights of a Transformers model get a LoRA adapter: `model.lora_targets` as modules and parameters of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_replay.errors import MoeReplayError
from moe_replay.replay.adapters.transformers_rules import router_numbers
from moe_replay.rollout.model_folder import build_model
from moe_replay.routes.router_families import load_router_family
from moe_replay.train.config.sections import ModelConfig

ALL_LINEAR = "all-linear"
ROUTER = "router"
# Transformers 5 keeps the projections of all experts of a layer in one tensor each, of which some hold two.
_FUSED = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "w3": "gate_up_proj",
    "w2": "down_proj",
}
_WHOLE: tuple[set[str], ...] = (
    {"gate_up_proj", "down_proj"},
    {"gate_proj", "up_proj", "down_proj"},
    {"w1", "w2", "w3"},
)
"""All projections of an expert, by the names of one model or another."""
_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))
_INSIDE_EXPERTS = re.compile(r"\.experts\.\d+\.")
_INSIDE_ROUTERS = ("gate", "router", "classifier")


class LoraError(MoeReplayError):
    """Adapters that cannot be added where the config asks for them."""


class Targets(NamedTuple):
    """Full names of linear layers, and of parameters of other modules: fused experts (E, out, in), router weights."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def has_whole_experts(self) -> bool:
        """Whether all projections of the experts are adapted, or none."""
        found = {_leaf(name) for name in self.modules if _INSIDE_EXPERTS.search(name)}
        found |= {_leaf(name) for name in self.parameters if _leaf(name.rpartition(".")[0]) == "experts"}
        return not found or any(whole <= found for whole in _WHOLE)

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
    linear, fused = set(_linear_layers(model)), set(_fused_experts(model))
    known = {_leaf(name) for name in linear | fused} | {_router_leaf(name) for name in routers}
    known |= {name for name, whole in _FUSED.items() if whole in known and any(_leaf(one) == whole for one in fused)}
    found: set[str] = set()
    for name in names:
        if name == ROUTER and routers:
            matching = routers
        elif name == ALL_LINEAR:
            matching = (linear | fused) - routers
        else:
            matching = {one for one in linear if _leaf(one) == name}
            matching |= {one for one in fused if _leaf(one) == _FUSED.get(name, name)}
            matching |= {one for one in routers if _router_leaf(one) == name}
        if not matching:
            raise LoraError(
                "model.lora_targets: no layer of this model has this name",
                expected=f"some of {', '.join(sorted({*known, ROUTER} if routers else known))}, or {ALL_LINEAR}",
                found=repr(name),
            )
        found |= matching
    for both in _HALVES:
        given = [name for name in both if name in names]
        if len(given) == 1 and not {ALL_LINEAR, "gate_up_proj"} & {*names} and "gate_up_proj" in map(_leaf, fused):
            raise LoraError(
                f"model.lora_targets: {both[0]} and {both[1]} of an expert are one tensor in this model",
                expected="both or none of them",
                found=repr(given[0]),
            )
    return Targets(tuple(sorted(found & linear)), tuple(sorted(found - linear)))


def targets_of(settings: Any, config: ModelConfig) -> Targets:
    """Return what `model.lora_targets` mean in the model of a Transformers config, which is not loaded."""
    with torch.device("meta"):
        model = build_model(settings, trust_remote_code=config.trust_remote_code)
    return find_targets(model, config.lora_targets, config.router_family)


def _linear_layers(model: Any) -> Iterator[str]:
    return (name for name, module in _inside_layers(model) if isinstance(module, nn.Linear))


def _fused_experts(model: Any) -> Iterator[str]:
    for name, module in _inside_layers(model):
        own = module.named_parameters(recurse=False)
        yield from (f"{name}.{parameter}" for parameter, tensor in own if tensor.ndim == 3)


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
