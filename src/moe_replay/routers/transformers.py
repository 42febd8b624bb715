"""Where the routers of a live Transformers model are: one `RouterSite` for each decoder layer that routes.

A router is the module in whose own forward the final top-k over the experts is made. Release 5 has a class for it in
each family and names it in the model's `_can_record_outputs`; release 4 often makes the choice in the middle of the
sparse block. What the model's classes say of themselves is taken from there, the rest is `_RULES`.

What is found is compared with what the config promises (`MoeTopology`), so a router that is missed is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from moe_replay.errors import UnsupportedRouterError
from moe_replay.routers.base import RouterSite
from moe_replay.routers.refused import refusal_by_class
from moe_replay.topology import ATTENTION_ROUTER, MoeLayer, MoeTopology


@dataclass(frozen=True, slots=True)
class RouterRule:
    """How to recognise a router by its class, and where it keeps its numbers.

    class_name   name of the class in whose forward the final top-k is made, or of one of its bases
    num_experts  attribute of the module, dots allowed ("config.num_experts"), or the number itself
    top_k        the same
    num_groups   the same, for routers that choose groups of experts first; 0: they do not
    groups_kept  the same
    """

    class_name: str
    num_experts: str | int = "num_experts"
    top_k: str | int = "top_k"
    num_groups: str | int = 0
    groups_kept: str | int = 0


# Routers that the model's class does not name in `_can_record_outputs`, or whose numbers are under other names.
_RULES = (
    RouterRule("DbrxFFN", num_experts="router.layer.out_features"),  # its router makes the logits, not the choice
    RouterRule("Gemma4TextRouter", num_experts="config.num_experts", top_k="config.top_k_experts"),
    RouterRule("LongcatFlashTopkRouter", num_experts="n_routed_experts"),  # zero-experts included
    RouterRule("ZayaRouter", num_experts="num_router_classes"),  # the skip expert included
    # Release 4. Where release 5 has the same class, the module it names inside is the router.
    RouterRule("AriaTextMoELayer", num_experts="config.moe_num_experts", top_k="config.moe_topk"),
    RouterRule("DbrxRouter", num_experts="moe_num_experts", top_k="moe_top_k"),
    RouterRule("DeepseekV2MoEGate", num_groups="num_group", groups_kept="topk_group"),
    RouterRule("DeepseekV3TopkRouter", "n_routed_experts", num_groups="n_group", groups_kept="topk_group"),
    RouterRule("Dots1TopkRouter", "n_routed_experts", num_groups="n_group", groups_kept="topk_group"),
    RouterRule("Glm4MoeTopkRouter", "n_routed_experts", num_groups="n_group", groups_kept="topk_group"),
    RouterRule("Glm4vMoeTextTopkRouter", "n_routed_experts", num_groups="n_group", groups_kept="topk_group"),
    RouterRule("GraniteMoeHybridTopKGating"),
    RouterRule("GraniteMoeSharedTopKGating"),
    RouterRule("GraniteMoeTopKGating"),
    RouterRule("HunYuanMoEV1Moe"),
    RouterRule("JambaSparseMoeBlock"),
    RouterRule("JetMoeTopKGating"),
    RouterRule("Llama4Router"),
    RouterRule("OlmoeSparseMoeBlock"),
    RouterRule("Qwen2MoeSparseMoeBlock"),
)

# What the router classes of release 5 have in common.
_RECORDED = RouterRule("", num_groups="num_group", groups_kept="topk_group")


def find_routers(
    model: nn.Module, extra: Sequence[RouterRule] = (), topology: MoeTopology | None = None
) -> list[RouterSite]:
    """The routers of the model's decoder, by layer.

    The model may be wrapped (PEFT, FSDP2, DDP, activation checkpointing) or hold its language model inside.
    extra     rules for routers that this library does not know; they come before its own
    topology  what the model should route, for model types that this library does not know
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    _refuse_known_bad(modules)
    promised = topology or topology_of(model)
    decoder = _decoder_name(modules, promised)
    _check_layer_indices(modules, decoder)
    sites = _sites(modules, decoder, _router_numbers(modules, extra))
    _check_promise(promised, sites, modules, decoder)
    return sites


def topology_of(model: nn.Module) -> MoeTopology:
    """What the config of a model, wrapped or not, promises."""
    config = _config_of(model)
    if config is None:
        raise UnsupportedRouterError(
            "the model has no config",
            expected="a module with a .config that has a model_type",
            found=type(model).__name__,
            remedy="Say which layers route: pass topology=MoeTopology(num_layers, moe_layers)",
        )
    return MoeTopology.from_config(config)


# ---- recognising a router ---------------------------------------------------------------------------------------


class _Numbers(NamedTuple):
    num_experts: int
    top_k: int
    num_groups: int
    groups_kept: int


def _router_numbers(modules: Mapping[str, nn.Module], extra: Sequence[RouterRule]) -> dict[str, _Numbers]:
    """The numbers of every router, by name. Where one contains another, the inner one makes the choice."""
    told = _matches(modules, extra)
    wrong = next((name for name, numbers in told.items() if numbers is None), None)
    if wrong is not None:
        raise _rule_does_not_fit(wrong, modules[wrong], extra)
    recorded = _recorded_classes(modules)
    known = {name: numbers for name, numbers in _matches(modules, _RULES).items() if numbers is not None}
    for name, module in modules.items():
        if isinstance(module, recorded) and name not in known and (numbers := _read(module, _RECORDED)) is not None:
            known[name] = numbers
    inner = {name: numbers for name, numbers in known.items() if not any(_is_inside(other, name) for other in known)}
    # What the user says of a module also settles the modules inside and around it.
    return {
        name: numbers
        for name, numbers in inner.items()
        if not any(_is_inside(name, mine) or _is_inside(mine, name) for mine in told)
    } | {name: numbers for name, numbers in told.items() if numbers is not None}


def _matches(modules: Mapping[str, nn.Module], rules: Sequence[RouterRule]) -> dict[str, _Numbers | None]:
    """Modules of a class that has a rule; None where the module lacks the attributes that the rule names."""
    by_class = {rule.class_name: rule for rule in reversed(rules)}
    found: dict[str, _Numbers | None] = {}
    for name, module in modules.items():
        rule = next((by_class[class_name] for class_name in _class_names(module) if class_name in by_class), None)
        if rule is not None:
            found[name] = _read(module, rule)
    return found


def _recorded_classes(modules: Mapping[str, nn.Module]) -> tuple[type, ...]:
    """The classes that the models of Transformers name as the source of their router logits."""
    classes: list[type] = []
    for module in modules.values():
        recorders = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                classes.append(target)
    return tuple(dict.fromkeys(classes))


def _read(module: nn.Module, rule: RouterRule) -> _Numbers | None:
    num_experts, top_k = _number(module, rule.num_experts), _number(module, rule.top_k)
    if num_experts is None or top_k is None:
        return None
    groups, kept = _number(module, rule.num_groups) or 0, _number(module, rule.groups_kept) or 0
    # One group is no choice; and deepseek_v2 has groups in its settings also when its method is not to use them.
    if groups <= 1 or getattr(module, "topk_method", None) == "greedy":
        groups = kept = 0
    return _Numbers(num_experts, top_k, groups, kept)


def _number(module: nn.Module, where: str | int) -> int | None:
    value: Any = where
    if isinstance(where, str):
        value = module
        for part in where.split("."):
            value = getattr(value, part, None)
    return value if isinstance(value, int) else None


def _class_names(module: nn.Module) -> list[str]:
    """Also the bases': FSDP2 gives a module a class of its own, derived from the one it had."""
    return [cls.__name__ for cls in type(module).__mro__]


def _is_inside(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.")


# ---- the decoder ------------------------------------------------------------------------------------------------


def _config_of(model: nn.Module) -> Any:
    """The config of the outermost module that has one of a model."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if getattr(config, "model_type", None)), None)


def _decoder_name(modules: Mapping[str, nn.Module], promised: MoeTopology) -> str:
    """The list of the language model's layers. Vision towers, talkers and draft heads have lists of their own."""
    lists = {name: len(module) for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    right_length = [name for name, length in lists.items() if length == promised.num_layers]
    outermost = [name for name in right_length if not any(_is_inside(name, other) for other in right_length)]
    owners = {name: _config_of(modules[name.rpartition(".")[0]]) for name in outermost}
    of_type = [name for name, config in owners.items() if getattr(config, "model_type", "") == promised.model_type]
    candidates = of_type or outermost
    if len(candidates) != 1:
        raise UnsupportedRouterError(
            "cannot tell which module list is the decoder",
            expected=f"one list of {promised.num_layers} layers",
            found={name: lists[name] for name in candidates} or lists,
            remedy="Pass the language model itself rather than what is around it",
        )
    return candidates[0]


def _sites(modules: Mapping[str, nn.Module], decoder: str, routers: Mapping[str, _Numbers]) -> list[RouterSite]:
    sites: dict[int, RouterSite] = {}
    for name, numbers in routers.items():
        if not _is_inside(name, decoder):
            continue
        position, *inside = name[len(decoder) + 1 :].split(".")
        layer = int(position)
        around = [".".join([decoder, position, *inside[:depth]]) for depth in range(1, len(inside))]
        # jetmoe's attention is a mixture of experts with a router of its own
        if any(type(modules[outer]).__name__.endswith("Attention") for outer in around):
            layer += ATTENTION_ROUTER
        site = RouterSite(layer, name, modules[name], **numbers._asdict())
        _check_alone(site, sites)
        sites[layer] = site
    return [sites[layer] for layer in sorted(sites)]


# ---- checks -----------------------------------------------------------------------------------------------------


def _refuse_known_bad(modules: Mapping[str, nn.Module]) -> None:
    for name, module in modules.items():
        refusal = refusal_by_class(_class_names(module))
        if refusal is not None:
            raise UnsupportedRouterError(
                f"{type(module).__name__} cannot be replayed: {refusal.reason}",
                layer=next((int(part) for part in name.split(".") if part.isdigit()), None),
                found=name,
            )


def _check_layer_indices(modules: Mapping[str, nn.Module], decoder: str) -> None:
    """A layer that says it is another one has been moved: its routes would go to the wrong layer."""
    for name, module in modules.items():
        if not _is_inside(name, decoder):
            continue
        position, _, inside = name[len(decoder) + 1 :].partition(".")
        index = getattr(module, "layer_idx", None)
        # longcat_flash numbers the two attentions of a layer, which stand in a list, in a row of their own
        in_a_list = any(part.isdigit() for part in inside.split("."))
        if isinstance(index, int) and not in_a_list and index != int(position):
            raise UnsupportedRouterError(
                f"{name} stands at position {position} of the decoder but says it is layer {index}",
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


def _check_promise(
    promised: MoeTopology, sites: Sequence[RouterSite], modules: Mapping[str, nn.Module], decoder: str
) -> None:
    """The live routers are those that the config promises: layers, experts and top-k."""
    found = {site.layer: MoeLayer(site.layer, site.num_experts, site.top_k) for site in sites}
    expected = {moe.layer: moe for moe in promised.moe_layers}
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
            remedy="The config was changed after the model was built, or this family's rule in topology.py is wrong",
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
        if _is_inside(name, inside) and type(module).__module__.partition(".")[0] != "torch"
    )
    return UnsupportedRouterError(
        f"no router found in a layer that routes; its modules are {looked_at or 'of torch alone'}",
        layer=layer,
        expected=f"routers in layers {expected}",
        found=f"routers in layers {found}",
        remedy="Name the class whose forward makes the final top-k: RouterRule(class_name=..., num_experts=..., "
        "top_k=...), as docs/routers.md explains",
    )


def _rule_does_not_fit(name: str, module: nn.Module, rules: Sequence[RouterRule]) -> UnsupportedRouterError:
    rule = next(rule for rule in rules if rule.class_name in _class_names(module))
    integers = {key: value for key, value in vars(module).items() if isinstance(value, int) and key[0] != "_"}
    return UnsupportedRouterError(
        f"the rule for {rule.class_name} does not fit {name}",
        expected=f"integers at num_experts={rule.num_experts!r} and top_k={rule.top_k!r}",
        found=f"integer attributes {integers}",
        remedy="Name the attributes that hold the numbers of experts and of choices, or give the numbers themselves",
    )
