"""`MoeTopology`: which decoder layers of a model route, over how many experts, with what top-k.

Read from a Transformers config, a Megatron-Core config or the routers of a live model. An unknown model type is an
error, not a guess; `router_families.py` lists the known ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from moe_replay.errors import UnsupportedRouterError
from moe_replay.routes.router_families import (
    ROUTER_FAMILIES,
    STATE_IT,
    Config,
    RouterFamily,
    decoder_depth,
    not_understood,
    refusal_by_type,
    setting,
)
from moe_replay.routes.trace_parts import MAX_EXPERTS

ATTENTION_ROUTER = 1 << 16
"""Added to the decoder index to name the router inside a layer's attention, where a layer routes twice (jetmoe)."""


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One router.

    layer        global decoder index; plus `ATTENTION_ROUTER` for the second router of a layer
    num_experts  columns the choice is made from, zero- and skip-experts included
    top_k        experts chosen for each token
    """

    layer: int
    num_experts: int
    top_k: int


class RoutedLayer(Protocol):
    """A router of a live model, as far as a topology is concerned."""

    @property
    def layer(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def top_k(self) -> int: ...


@dataclass(frozen=True)
class MoeTopology:
    """The routers of a model, in the order of `layer`. Layers that route by a table of token ids are not part of it.

    Example:
        MoeTopology(num_layers=4, moe_layers=tuple(MoeLayer(i, num_experts=8, top_k=2) for i in (1, 2, 3)))
    """

    num_layers: int
    moe_layers: tuple[MoeLayer, ...]
    model_type: str = ""

    def __post_init__(self) -> None:
        if not self.moe_layers:
            raise UnsupportedRouterError(
                f"the model{self._of_type()} has no routers",
                expected="at least one mixture-of-experts layer",
                found=f"{self.num_layers} dense layers",
                remedy="Routing replay is for mixture-of-experts models; train a dense model without it",
            )
        if any(left >= right for left, right in zip(self.layers, self.layers[1:], strict=False)):
            raise UnsupportedRouterError(
                "layers of a topology must increase", expected="each layer once", found=list(self.layers)
            )
        for moe in self.moe_layers:
            if not 0 <= moe.layer % ATTENTION_ROUTER < self.num_layers or moe.layer >= 2 * ATTENTION_ROUTER:
                raise UnsupportedRouterError(
                    "a router outside the decoder",
                    layer=moe.layer,
                    expected=f"a layer below {self.num_layers}, or {ATTENTION_ROUTER} + such a layer",
                    found=moe.layer,
                )
            if not 1 <= moe.top_k <= moe.num_experts:
                raise UnsupportedRouterError(
                    "a router must choose at least one and at most all of its experts",
                    layer=moe.layer,
                    expected=f"top_k from 1 to {moe.num_experts}",
                    found=moe.top_k,
                )
            if moe.num_experts > MAX_EXPERTS:
                raise UnsupportedRouterError(
                    "a router with more experts than ids can name",
                    layer=moe.layer,
                    expected=f"at most {MAX_EXPERTS} experts",
                    found=moe.num_experts,
                )

    # ---- properties ---------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> tuple[int, ...]:
        return tuple(moe.layer for moe in self.moe_layers)

    @cached_property
    def num_experts(self) -> int:
        """Experts of every layer; an error where the layers differ."""
        return self._uniform("num_experts", {moe.layer: moe.num_experts for moe in self.moe_layers})

    @cached_property
    def top_k(self) -> int:
        """Experts per token in every layer; an error where the layers differ."""
        return self._uniform("top_k", {moe.layer: moe.top_k for moe in self.moe_layers})

    # ---- constructors ------------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: Config, family: RouterFamily | None = None) -> MoeTopology:
        """Read a Transformers config (the text config inside a multimodal one) or a Megatron `TransformerConfig`.

        `family` describes a model type that `ROUTER_FAMILIES` does not have.
        """
        if family is None and setting(config, "moe_router_topk") is not None and setting(config, "model_type") is None:
            return _from_megatron(config)
        return _from_transformers(text_config(config), family)

    @classmethod
    def from_sites(cls, sites: Sequence[RoutedLayer], num_layers: int, model_type: str = "") -> MoeTopology:
        """Return the topology of the routers of a live model."""
        in_order = sorted(sites, key=lambda site: site.layer)
        moe_layers = tuple(MoeLayer(site.layer, site.num_experts, site.top_k) for site in in_order)
        return cls(num_layers, moe_layers, model_type)

    # ---- helpers ------------------------------------------------------------------------------------------------

    def _of_type(self) -> str:
        return f" ({self.model_type})" if self.model_type else ""

    def _uniform(self, name: str, values: dict[int, int]) -> int:
        if len(set(values.values())) > 1:
            raise UnsupportedRouterError(
                f"{name} is not the same in every layer of this model{self._of_type()}",
                expected=f"one {name}",
                found=f"by layer {values}",
                remedy="Read it from moe_layers, layer by layer",
            )
        return next(iter(values.values()))


def text_config(config: Config) -> Config:
    """Return the config of the language model inside a multimodal config, or the config itself."""
    inner = setting(config, "get_text_config")
    return inner() if inner is not None else config


# ---- Megatron-Core ----------------------------------------------------------------------------------------------


def _from_megatron(config: Config) -> MoeTopology:
    """Read `moe_layer_freq`, a period or one flag per layer; layers of multi-token prediction come after."""
    depth, frequency = config.num_layers, config.moe_layer_freq
    pattern = [i % frequency == 0 for i in range(depth)] if isinstance(frequency, int) else list(frequency)
    if len(pattern) != depth:
        raise not_understood("moe_layer_freq", f"{depth} flags, one a layer", f"{len(pattern)} flags")
    sparse = [i for i, flag in enumerate(pattern) if flag] if config.num_moe_experts else []
    moe_layers = tuple(MoeLayer(layer, config.num_moe_experts, config.moe_router_topk) for layer in sparse)
    return MoeTopology(depth, moe_layers, "megatron")


# ---- Transformers -----------------------------------------------------------------------------------------------

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "ffn_config.moe_top_k")


def _from_transformers(config: Config, own_family: RouterFamily | None) -> MoeTopology:
    model_type = setting(config, "model_type") or type(config).__name__
    family = own_family or ROUTER_FAMILIES.get(model_type)
    if family is None:
        raise _unknown_family(config, model_type)
    experts = _by_any_name(config, (family.num_experts,) if family.num_experts else _EXPERTS)
    # granitemoehybrid, qwen: without experts the model is dense
    layers = family.sparse_layers(config) if experts else ()
    top_k = _by_any_name(config, (family.top_k,) if family.top_k else _TOP_K) if layers else 0
    added = _experts_without_weights(config)
    in_mlp = [MoeLayer(i, _in_layer(i, experts, config) + added, _in_layer(i, top_k, config)) for i in layers]
    in_attention = [replace(moe, layer=moe.layer + ATTENTION_ROUTER) for moe in in_mlp if model_type == "jetmoe"]
    return MoeTopology(decoder_depth(config), (*in_mlp, *in_attention), model_type)


def _in_layer(layer: int, number: int | Sequence[int], config: Config) -> int:
    """Return the number of one layer; some families have a list with one per layer (hunyuan_v1_moe)."""
    if isinstance(number, int):
        return number
    if len(number) != decoder_depth(config):
        raise not_understood("list of numbers", f"{decoder_depth(config)} numbers, one a layer", number)
    return number[layer]


def _experts_without_weights(config: Config) -> int:
    """Return the router's columns beyond the real experts: zero-experts (longcat_flash), the skip expert (zaya)."""
    if config.model_type == "longcat_flash":
        return config.zero_expert_num or 0
    return int(config.model_type == "zaya")


def _by_any_name(config: Config, names: tuple[str, ...]) -> int | Sequence[int]:
    values = {name: value for name in names if (value := setting(config, name)) is not None}
    numbers = list(values.values())
    if not numbers or any(value != numbers[0] for value in numbers):
        raise not_understood(" / ".join(values or names), "one number, the same under each name", values)
    return numbers[0]


# ---- errors -----------------------------------------------------------------------------------------------------


def _unknown_family(config: Config, model_type: str) -> UnsupportedRouterError:
    """Return the error for a model type that is refused, dense or unknown."""
    refusal = refusal_by_type(model_type)
    signs = {name: value for name, value in sorted(vars(config).items()) if _looks_like_moe(name, value)}
    if setting(config, "is_moe") is False:  # doge: dense unless told otherwise
        signs = {}
    if refusal is not None and signs:
        return UnsupportedRouterError(f"{model_type} cannot be replayed: {refusal.reason}")
    if not signs:
        return UnsupportedRouterError(
            f"the model ({model_type}) has no routers",
            expected="a mixture-of-experts config",
            found="no setting about experts",
            remedy="Routing replay is for mixture-of-experts models; train a dense model without it",
        )
    return UnsupportedRouterError(
        f"unknown mixture-of-experts model type {model_type!r}",
        expected="a known family",
        found=signs,
        remedy=STATE_IT,
    )


def _looks_like_moe(name: str, value: object) -> bool:
    return not name.startswith("_") and ("expert" in name or "moe" in name) and bool(value)
