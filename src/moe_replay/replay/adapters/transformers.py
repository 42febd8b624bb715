"""The routers of a live Transformers model: one `RouterSite` for each decoder layer that routes.

A router is the module in whose own forward the final top-k over the experts is made. Release 5 has a class for it in
each family and names it in the model's `_can_record_outputs`; release 4 often makes the choice in the middle of the
sparse block. What the model's classes declare is taken from there, the rest is in `ROUTER_FAMILIES`.

The routers found are compared with what the config declares (`MoeTopology`): a missed router is an error, never a layer
that silently routes natively.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.site import RouterSite, outwards
from moe_replay.routes.router_families import ROUTER_FAMILIES, RouterFamily, RouterRule, refusal_by_class
from moe_replay.routes.topology import ATTENTION_ROUTER, MoeLayer, MoeTopology, text_config
from moe_replay.utils.tested_versions import notice_if_newer

__all__ = ["RouterFamily", "RouterRule", "find_routers", "topology_of"]


def find_routers(
    model: nn.Module, extra: Sequence[RouterRule] = (), topology: MoeTopology | None = None
) -> list[RouterSite]:
    """Return the routers of the model's decoder, by layer.

    The model may be wrapped (PEFT, FSDP2, DDP, activation checkpointing) or hold its language model inside.
    extra     rules for routers unknown to this library; they take precedence over its own
    topology  the layers that route, for model types unknown to this library
    """
    notice_if_newer("transformers")
    modules = dict(model.named_modules(remove_duplicate=False))
    _refuse_known_bad(modules)
    declared = topology or topology_of(model)
    routers = router_numbers(modules, extra)
    model_type = declared.model_type or getattr(text_config(_config_of(model.modules())), "model_type", "")
    decoder = _decoder_name(modules, declared, model_type, routers)
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


def _decoder_name(
    modules: Mapping[str, nn.Module], declared: MoeTopology, model_type: str, routers: Iterable[str]
) -> str:
    """Return the name of the language model's list of layers; vision towers, talkers and draft heads have their own."""
    lengths = {name: len(module) for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    deep_enough = [name for name, length in lengths.items() if length == declared.num_layers]
    outermost = [name for name in deep_enough if not any(is_inside(name, other) for other in deep_enough)]
    owners = {name: _config_of(modules[outer] for outer in outwards(name)) for name in outermost}
    of_type = [name for name, config in owners.items() if getattr(config, "model_type", "") == model_type]
    candidates = of_type or outermost
    if len(candidates) > 1:  # granitemoe_swa of one layer has a list of one rotary embedding next to it
        candidates = [name for name in candidates if any(is_inside(router, name) for router in routers)] or candidates
    if len(candidates) != 1:
        raise UnsupportedRouterError(
            "cannot tell which module list is the decoder",
            expected=f"one list of {declared.num_layers} layers",
            found={name: lengths[name] for name in candidates} or lengths,
            remedy="Pass the language model itself rather than what is around it",
        )
    return candidates[0]


def _sites(modules: Mapping[str, nn.Module], decoder: str, routers: Mapping[str, RouterNumbers]) -> list[RouterSite]:
    sites: dict[int, RouterSite] = {}
    for name, numbers in routers.items():
        if not is_inside(name, decoder):
            continue
        layer = int(name[len(decoder) + 1 :].partition(".")[0])
        # jetmoe's attention is a mixture of experts with its own router
        if any(type(modules[outer]).__name__.endswith("Attention") for outer in outwards(name)):
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
    actual = {site.layer: MoeLayer(site.layer, site.num_experts, site.top_k) for site in sites}
    expected = {moe.layer: moe for moe in declared.moe_layers}
    missing = sorted(expected.keys() - actual.keys())
    if missing:
        raise _router_not_found(missing[0], list(expected), list(actual), modules, decoder)
    surplus = sorted(actual.keys() - expected.keys())
    if surplus:
        raise UnsupportedRouterError(
            "the model routes in a layer that its config calls dense",
            layer=surplus[0],
            expected=f"layers {list(expected)}",
            found=f"layers {list(actual)}",
            remedy="The config was changed after the model was built, or its family in router_families.py is wrong",
        )
    different = next((layer for layer in expected if expected[layer] != actual[layer]), None)
    if different is not None:
        raise UnsupportedRouterError(
            "router and config disagree",
            layer=different,
            expected=_brief(expected[different]),
            found=_brief(actual[different]),
            remedy="The config was changed after the model was built, or the RouterRule reads the wrong attributes",
        )


def _brief(moe: MoeLayer) -> str:
    return f"top {moe.top_k} of {moe.num_experts} experts"


def _router_not_found(
    layer: int, expected: list[int], actual: list[int], modules: Mapping[str, nn.Module], decoder: str
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
        found=f"routers in layers {actual}",
        remedy="Name the class whose forward makes the final top-k: RouterRule(class_name=..., num_experts=..., "
        "top_k=...), as docs/routers.md explains",
    )


# ---- recognising routers ---------------------------------------------------------------------------------------------

# Common to the router classes of release 5.
_RECORDED = RouterRule("", num_groups="num_group", groups_kept="topk_group")
_BUILT_IN = tuple(rule for family in ROUTER_FAMILIES.values() for rule in family.routers)
_BY_WEIGHT = RouterRule("", num_experts="weight.shape.0")  # ernie4_5_moe in the first releases of 5

# Releases 5.0 to 5.17 compute the logits in a router class and make the choice in a method of the sparse block.
_BLOCK_METHOD = "route_tokens_to_experts"
_BLOCK_EXPERTS = (
    "n_routed_experts",
    "num_experts",
    "config.num_experts",
    "config.n_routed_experts",
    "config.moe_num_experts",
    "gate.out_features",
)
_BLOCK_TOP_K = ("top_k", "config.moe_topk")
_BLOCK_GROUPS = ("n_group", "num_group")

# Release 5.18 has router classes that no model names in `_can_record_outputs`.
_ROUTER_SUFFIXES = ("TopkRouter", "TopKRouter", "TokenChoiceRouter", "MoEV1Gate")


class RouterNumbers(NamedTuple):
    """The numbers of a `RouterSite`."""

    num_experts: int
    top_k: int
    num_groups: int
    groups_kept: int


def router_numbers(modules: Mapping[str, nn.Module], extra: Sequence[RouterRule]) -> dict[str, RouterNumbers]:
    """Return the numbers of every router, by name. Where one contains another, the inner one makes the choice."""
    recorded = _recorded_classes(modules)
    routers: dict[str, RouterNumbers] = {}
    for name, module in modules.items():
        rule = _rule_for(module, _BUILT_IN)
        numbers = _read(module, rule) if rule is not None else None
        is_named = any(class_name.endswith(_ROUTER_SUFFIXES) for class_name in class_names(module))
        if numbers is None and (is_named or isinstance(module, recorded)):
            numbers = _read(module, _RECORDED) or _read(module, _BY_WEIGHT)
        if numbers is not None:
            routers[name] = numbers
    blocks = _choosing_blocks(modules)
    routers = {
        name: numbers for name, numbers in routers.items() if not any(is_inside(name, block) for block in blocks)
    }
    routers |= blocks
    innermost = {name for name in routers if not any(is_inside(other, name) for other in routers)}
    by_user = _from_user_rules(modules, extra)
    # A user's rule for a module also decides for the modules inside and around it.
    undecided = {
        name
        for name in innermost
        if not any(is_inside(name, user_module) or is_inside(user_module, name) for user_module in by_user)
    }
    return {name: numbers for name, numbers in routers.items() if name in undecided} | by_user


def _choosing_blocks(modules: Mapping[str, nn.Module]) -> dict[str, RouterNumbers]:
    """Sparse blocks that choose the experts themselves, regardless of router classes inside."""
    blocks: dict[str, RouterNumbers] = {}
    for name, module in modules.items():
        if callable(getattr(type(module), _BLOCK_METHOD, None)):
            rule = RouterRule(
                "",
                num_experts=_first_number(module, _BLOCK_EXPERTS),
                top_k=_first_number(module, _BLOCK_TOP_K),
                num_groups=_first_number(module, _BLOCK_GROUPS),
                groups_kept="topk_group",
            )
            if numbers := _read(module, rule):
                blocks[name] = numbers
    return blocks


def _first_number(module: nn.Module, names: Sequence[str]) -> str:
    return next((name for name in names if _number(module, name) is not None), names[0])


def _from_user_rules(modules: Mapping[str, nn.Module], extra: Sequence[RouterRule]) -> dict[str, RouterNumbers]:
    by_user: dict[str, RouterNumbers] = {}
    for name, module in modules.items():
        rule = _rule_for(module, extra)
        if rule is None:
            continue
        numbers = _read(module, rule)
        if numbers is None or _number(module, rule.num_groups) is None or _number(module, rule.groups_kept) is None:
            raise _rule_does_not_fit(name, module, rule)
        by_user[name] = numbers
    return by_user


def _rule_for(module: nn.Module, rules: Sequence[RouterRule]) -> RouterRule | None:
    """Return the first rule for the module's class, or for a base of it."""
    names = class_names(module)
    return next((rule for rule in rules if rule.class_name in names), None)


def _recorded_classes(modules: Mapping[str, nn.Module]) -> tuple[type, ...]:
    """Return the classes that the models of Transformers name as the source of their router logits."""
    classes: list[type] = []
    for module in modules.values():
        recorders = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                classes.append(target)
    return tuple(dict.fromkeys(classes))


def _read(module: nn.Module, rule: RouterRule) -> RouterNumbers | None:
    num_experts, top_k = _number(module, rule.num_experts), _number(module, rule.top_k)
    if num_experts is None or top_k is None:
        return None
    groups, kept = _number(module, rule.num_groups) or 0, _number(module, rule.groups_kept) or 0
    # One group is no choice; and deepseek_v2 has groups in its settings also when its method is not to use them.
    if groups <= 1 or getattr(module, "topk_method", None) == "greedy":
        groups = kept = 0
    return RouterNumbers(num_experts, top_k, groups, kept)


def _number(module: nn.Module, where: str | int) -> int | None:
    value: Any = where
    if isinstance(where, str):
        value = cast(Any, module)
        for part in where.split("."):
            value = value[int(part)] if part.isdigit() and value else getattr(value, part, None)
    return value if isinstance(value, int) else None


def class_names(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's class and its bases: FSDP2 gives a module a class derived from its own."""
    return frozenset(cls.__name__ for cls in type(module).__mro__)


def is_inside(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.")


def _rule_does_not_fit(name: str, module: nn.Module, rule: RouterRule) -> UnsupportedRouterError:
    integers = {key: value for key, value in vars(module).items() if isinstance(value, int) and key[0] != "_"}
    return UnsupportedRouterError(
        f"the rule for {rule.class_name} does not fit {name}",
        expected=f"integers at the attributes of {rule}",
        found=f"integer attributes {integers}",
        remedy="Name the attributes that hold the numbers of experts and of choices, or give the numbers themselves",
    )
