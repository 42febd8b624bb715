"""The routers of a live Transformers model: one `RouterSite` for each decoder layer that routes.

What is found (by the rules of `transformers_rules.py`) is compared with what the config declares (`MoeTopology`): a
router that is missed is an error, never a layer that silently routes natively.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.adapters.transformers_rules import (
    RouterNumbers,
    class_names,
    is_inside,
    router_numbers,
)
from moe_replay.replay.site import RouterSite
from moe_replay.routes.refused import refusal_by_class
from moe_replay.routes.router_families import RouterFamily, RouterRule
from moe_replay.routes.topology import ATTENTION_ROUTER, MoeLayer, MoeTopology, text_config

__all__ = ["RouterFamily", "RouterRule", "find_routers", "topology_of"]


def find_routers(
    model: nn.Module, extra: Sequence[RouterRule] = (), topology: MoeTopology | None = None
) -> list[RouterSite]:
    """Return the routers of the model's decoder, by layer.

    The model may be wrapped (PEFT, FSDP2, DDP, activation checkpointing) or hold its language model inside.
    extra     rules for routers unknown to this library; they take precedence over its own
    topology  the layers that route, for model types unknown to this library
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _refuse_known_bad(modules)
    declared = topology or topology_of(model)
    routers = router_numbers(modules, extra)
    decoder = _decoder_name(modules, declared, declared.model_type or _text_type(model), routers)
    _check_layer_indices(modules, decoder)
    sites = _sites(modules, decoder, routers)
    _check_topology(declared, sites, modules, decoder)
    return sites


def topology_of(model: nn.Module, family: RouterFamily | None = None) -> MoeTopology:
    """Return what the config of a model, wrapped or not, declares."""
    config = _config_of(model.modules())
    if config is None:
        raise UnsupportedRouterError(
            "the model has no config",
            expected="a module with a .config that has a model_type",
            found=type(model).__name__,
            remedy="State which layers route: pass topology=MoeTopology(num_layers, moe_layers)",
        )
    return MoeTopology.from_config(config, family)


# ---- the decoder ------------------------------------------------------------------------------------------------


def _config_of(modules: Iterable[nn.Module]) -> Any:
    """Return the first config among these modules that names a model type."""
    configs = (getattr(module, "config", None) for module in modules)
    return next((config for config in configs if getattr(config, "model_type", None)), None)


def _text_type(model: nn.Module) -> str:
    return getattr(text_config(_config_of(model.modules())), "model_type", "")


def _decoder_name(
    modules: Mapping[str, nn.Module], declared: MoeTopology, model_type: str, routers: Iterable[str]
) -> str:
    """Return the name of the language model's list of layers; vision towers, talkers and draft heads have their own."""
    lengths = {name: len(module) for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    deep_enough = [name for name, length in lengths.items() if length == declared.num_layers]
    outermost = [name for name in deep_enough if not any(is_inside(name, other) for other in deep_enough)]
    owners = {name: _config_of(modules[outer] for outer in _outwards(name)) for name in outermost}
    of_type = [name for name, config in owners.items() if getattr(config, "model_type", "") == model_type]
    candidates = of_type or outermost
    if len(candidates) > 1:  # granitemoe_swa of one layer has a list of one rotary embedding beside it
        candidates = [name for name in candidates if any(is_inside(router, name) for router in routers)] or candidates
    if len(candidates) != 1:
        raise UnsupportedRouterError(
            "cannot tell which module list is the decoder",
            expected=f"one list of {declared.num_layers} layers",
            found={name: lengths[name] for name in candidates} or lengths,
            remedy="Pass the language model itself rather than what is around it",
        )
    return candidates[0]


def _outwards(name: str) -> Iterator[str]:
    """Yield the names of the enclosing modules, from the nearest to the model itself, whose name is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _sites(modules: Mapping[str, nn.Module], decoder: str, routers: Mapping[str, RouterNumbers]) -> list[RouterSite]:
    sites: dict[int, RouterSite] = {}
    for name, numbers in routers.items():
        if not is_inside(name, decoder):
            continue
        layer = int(name[len(decoder) + 1 :].partition(".")[0])
        # jetmoe's attention is a mixture of experts with a router of its own
        if any(type(modules[outer]).__name__.endswith("Attention") for outer in _outwards(name)):
            layer += ATTENTION_ROUTER
        site = RouterSite(layer, name, modules[name], **numbers._asdict())
        _check_alone(site, sites)
        sites[layer] = site
    return [sites[layer] for layer in sorted(sites)]


# ---- checks -----------------------------------------------------------------------------------------------------


def _refuse_known_bad(modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        refusal = refusal_by_class(class_names(module))
        if refusal is not None:
            raise UnsupportedRouterError(
                f"{type(module).__name__} cannot be replayed: {refusal.reason}",
                layer=next((int(part) for part in name.split(".") if part.isdigit()), None),
                found=name,
            )


def _check_layer_indices(modules: Mapping[str, nn.Module], decoder: str) -> None:
    """Raise for a layer whose own index is another: it was moved, and its routes would go to the wrong layer."""
    for name, module in modules.items():
        if not is_inside(name, decoder):
            continue
        position, _, inside = name[len(decoder) + 1 :].partition(".")
        index = getattr(module, "layer_idx", None)
        # longcat_flash numbers the two attentions of a layer, which are in a list, separately
        in_a_list = any(part.isdigit() for part in inside.split("."))
        if isinstance(index, int) and not in_a_list and index != int(position):
            raise UnsupportedRouterError(
                f"{name} is at position {position} of the decoder but has layer index {index}",
                layer=int(position),
                expected=f"layer_idx {position}",
                found=index,
                remedy="Layers were dropped or moved; renumber them, so that routes can be named by layer",
            )


def _check_alone(site: RouterSite, others: Mapping[int, RouterSite]) -> None:
    for other in others.values():
        if other.layer == site.layer:
            raise UnsupportedRouterError(
                "two routers in one layer",
                layer=site.layer,
                expected="one",
                found=f"{other.name} and {site.name}",
                remedy="If one of them is a copy (PEFT's modules_to_save keeps one), train the router in place",
            )
        if other.module is site.module:
            raise UnsupportedRouterError(
                "one router serves two layers, so that their routes cannot be told apart",
                layer=site.layer,
                found=f"{other.name} and {site.name}",
            )


def _check_topology(
    declared: MoeTopology, sites: Sequence[RouterSite], modules: Mapping[str, nn.Module], decoder: str
) -> None:
    """Raise unless the live routers have the layers, experts and top-k that the config declares."""
    found = {site.layer: MoeLayer(site.layer, site.num_experts, site.top_k) for site in sites}
    expected = {moe.layer: moe for moe in declared.moe_layers}
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise _router_not_found(missing[0], list(expected), list(found), modules, decoder)
    surplus = sorted(found.keys() - expected.keys())
    if surplus:
        raise UnsupportedRouterError(
            "the model routes in a layer that its config calls dense",
            layer=surplus[0],
            expected=f"layers {list(expected)}",
            found=f"layers {list(found)}",
            remedy="The config was changed after the model was built, or its family in router_families.py is wrong",
        )
    different = next((layer for layer in expected if expected[layer] != found[layer]), None)
    if different is not None:
        raise UnsupportedRouterError(
            "router and config disagree",
            layer=different,
            expected=_brief(expected[different]),
            found=_brief(found[different]),
            remedy="The config was changed after the model was built, or the RouterRule reads the wrong attributes",
        )


def _brief(moe: MoeLayer) -> str:
    return f"top {moe.top_k} of {moe.num_experts} experts"


def _router_not_found(
    layer: int, expected: list[int], found: list[int], modules: Mapping[str, nn.Module], decoder: str
) -> UnsupportedRouterError:
    inside = f"{decoder}.{layer % ATTENTION_ROUTER}"
    looked_at = ", ".join(
        f"{name[len(inside) + 1 :]}: {type(module).__name__}"
        for name, module in modules.items()
        if is_inside(name, inside) and type(module).__module__.partition(".")[0] != "torch"
    )
    return UnsupportedRouterError(
        f"no router found in a layer that routes; its modules are {looked_at or 'of torch alone'}",
        layer=layer,
        expected=f"routers in layers {expected}",
        found=f"routers in layers {found}",
        remedy="Name the class whose forward makes the final top-k: RouterRule(class_name=..., num_experts=..., "
        "top_k=...), as docs/routers.md explains",
    )
