"""Which modules of a live Transformers model are routers, and how many experts they choose from.

A router is the module in whose own forward the final top-k over the experts is made. Release 5 has a class for it in
each family and names it in the model's `_can_record_outputs`; release 4 often makes the choice in the middle of the
sparse block. What the model's classes declare is taken from there, the rest is in `ROUTER_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from moe_replay.errors import UnsupportedRouterError
from moe_replay.routes.router_families import ROUTER_FAMILIES, RouterRule

# What the router classes of release 5 have in common.
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
    known: dict[str, RouterNumbers] = {}
    for name, module in modules.items():
        rule = _rule_for(module, _BUILT_IN)
        numbers = _read(module, rule) if rule is not None else None
        if numbers is None and (isinstance(module, recorded) or _is_named_router(module)):
            numbers = _read(module, _RECORDED) or _read(module, _BY_WEIGHT)
        if numbers is not None:
            known[name] = numbers
    blocks = _choosing_blocks(modules)
    known = {name: numbers for name, numbers in known.items() if not any(is_inside(name, block) for block in blocks)}
    known |= blocks
    innermost = {name for name in known if not any(is_inside(other, name) for other in known)}
    by_user = _from_user_rules(modules, extra)
    # A user's rule for a module also decides for the modules inside and around it.
    undecided = {
        name for name in innermost if not any(is_inside(name, mine) or is_inside(mine, name) for mine in by_user)
    }
    return {name: numbers for name, numbers in known.items() if name in undecided} | by_user


def _choosing_blocks(modules: Mapping[str, nn.Module]) -> dict[str, RouterNumbers]:
    """Sparse blocks that choose the experts themselves, whatever router classes they contain."""
    found: dict[str, RouterNumbers] = {}
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
                found[name] = numbers
    return found


def _first_number(module: nn.Module, names: Sequence[str]) -> str:
    return next((name for name in names if _number(module, name) is not None), names[0])


def _is_named_router(module: nn.Module) -> bool:
    return any(name.endswith(_ROUTER_SUFFIXES) for name in class_names(module))


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
    """Return whether a module is inside another, by their names."""
    return name.startswith(f"{outer}.")


def _rule_does_not_fit(name: str, module: nn.Module, rule: RouterRule) -> UnsupportedRouterError:
    integers = {key: value for key, value in vars(module).items() if isinstance(value, int) and key[0] != "_"}
    return UnsupportedRouterError(
        f"the rule for {rule.class_name} does not fit {name}",
        expected=f"integers at the attributes of {rule}",
        found=f"integer attributes {integers}",
        remedy="Name the attributes that hold the numbers of experts and of choices, or give the numbers themselves",
    )
