"""Which decoder layers of each Transformers family are sparse, by its config.

Each convention is one small function: config -> the decoder indices of the layers that route. `router_families.py` maps
model types to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_replay.errors import UnsupportedRouterError

# A config is read by attribute: Transformers is not imported here.
Config = Any

STATE_IT = (
    "If you know which layers route, pass topology=MoeTopology(num_layers, moe_layers), "
    "and see docs/routers.md for how to add a family"
)


def setting(config: Config, name: str) -> Any:
    """Return a setting, None where the config lacks it. Dots lead into nested configs."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def decoder_depth(config: Config) -> int:
    """Return the number of decoder layers; `num_hidden_layers` of longcat_flash counts two attentions per layer."""
    return config.num_layers if config.model_type == "longcat_flash" else config.num_hidden_layers


def not_understood(name: str, expected: str, found: object) -> UnsupportedRouterError:
    """Return the error for an inconsistent config."""
    return UnsupportedRouterError(
        f"the config's {name} cannot be understood", expected=expected, found=found, remedy=STATE_IT
    )


def every_layer(config: Config) -> Sequence[int]:
    """Return all layers."""
    return range(decoder_depth(config))


def every_layer_if_enabled(config: Config) -> Sequence[int]:
    """Return all layers if `enable_moe_block` is set: dense and sparse models of gemma4 share a model type."""
    return every_layer(config) if config.enable_moe_block else ()


def after_first_k_dense(config: Config) -> Sequence[int]:
    """Return the layers after the first `first_k_dense_replace` dense ones."""
    return range(config.first_k_dense_replace, decoder_depth(config))


def after_num_dense(config: Config) -> Sequence[int]:
    """Return the layers after the first `num_dense_layers` dense ones."""
    return range(config.num_dense_layers, decoder_depth(config))


def by_sparse_step(config: Config) -> Sequence[int]:
    """Return each `decoder_sparse_step`-th layer, counted from one, less an explicit list of dense ones (qwen)."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    return [i for i in range(decoder_depth(config)) if i not in dense and (i + 1) % step == 0]


def by_mlp_types(config: Config) -> Sequence[int]:
    """Return the layers whose type is sparse; in "hash_moe" (deepseek_v4) experts are a function of the token id."""
    return _positions(config, "mlp_layer_types", known=("dense", "sparse", "moe", "hash_moe"), wanted=("sparse", "moe"))


def by_block_types(config: Config) -> Sequence[int]:
    """Return the layers of type "moe": a layer is a mixer, an MLP or a mixture of experts (nemotron_h)."""
    known = ("mamba", "linear_attention", "attention", "full_attention", "sliding_attention", "mlp", "moe")
    return _positions(config, "layers_block_type", known=known, wanted=("moe",))


def by_list(config: Config) -> Sequence[int]:
    """Return the `moe_layers` that the config derives from `interleave_moe_layer_step` (llama4)."""
    return sorted(config.moe_layers)


def by_period(config: Config) -> Sequence[int]:
    """Return each `expert_layer_period`-th layer; a single expert is an MLP (jamba)."""
    period, offset = config.expert_layer_period, config.expert_layer_offset
    return [i for i in range(decoder_depth(config)) if i % period == offset and config.num_experts > 1]


def by_interval(config: Config) -> Sequence[int]:
    """Return each `moe_layer_interval`-th layer, counted from one, between two inclusive bounds (ernie4_5)."""
    first, last, interval = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    return [i for i in range(decoder_depth(config)) if (i + 1) % interval == 0 and first <= i <= last]


def _positions(config: Config, name: str, known: tuple[str, ...], wanted: tuple[str, ...]) -> Sequence[int]:
    kinds = setting(config, name)
    if kinds is None or len(kinds) != decoder_depth(config):
        raise not_understood(name, f"{decoder_depth(config)} names, one a layer", kinds)
    if strange := sorted(set(kinds).difference(known)):
        raise not_understood(name, f"names among {known}", strange)
    return [i for i, kind in enumerate(kinds) if kind in wanted]
