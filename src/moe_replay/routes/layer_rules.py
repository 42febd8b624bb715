"""Which decoder layers of each Transformers family are sparse, by its config.

Almost every family writes it in a way of its own. Each way is one small function, and `LAYER_RULES` says which family
uses which. A setting is never trusted for its mere presence: published configs carry settings that the code of their
model ignores. So a model type is in the table because somebody has read its code and a test has compared the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moe_replay.errors import UnsupportedRouterError

# A config is read by attribute: Transformers is not imported here.
Config = Any
LayerRule = Callable[[Config], Sequence[int]]

STATE_IT = (
    "If you know which layers route, say so: pass topology=MoeTopology(num_layers, moe_layers), "
    "and see docs/routers.md for how to add a family"
)


def setting(config: Config, name: str) -> Any:
    """A setting that some configs lack: None there. Dots lead into nested configs."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def decoder_depth(config: Config) -> int:
    """longcat_flash counts two for each decoder layer in `num_hidden_layers`, one for each of its attentions."""
    return config.num_layers if config.model_type == "longcat_flash" else config.num_hidden_layers


def not_understood(name: str, expected: str, found: object) -> UnsupportedRouterError:
    """The error for a config that contradicts itself."""
    return UnsupportedRouterError(
        f"the config's {name} cannot be understood", expected=expected, found=found, remedy=STATE_IT
    )


def _every_layer(config: Config) -> Sequence[int]:
    return range(decoder_depth(config))


def _every_layer_if_enabled(config: Config) -> Sequence[int]:
    """gemma4: dense and sparse models share a model type."""
    return _every_layer(config) if config.enable_moe_block else ()


def _after_first_k_dense(config: Config) -> Sequence[int]:
    return range(config.first_k_dense_replace, decoder_depth(config))


def _after_num_dense(config: Config) -> Sequence[int]:
    return range(config.num_dense_layers, decoder_depth(config))


def _by_sparse_step(config: Config) -> Sequence[int]:
    """qwen: each `decoder_sparse_step`-th layer, counted from one, less an explicit list of dense ones."""
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    return [i for i in range(decoder_depth(config)) if i not in dense and (i + 1) % step == 0]


def _by_mlp_types(config: Config) -> Sequence[int]:
    """One name a layer. "hash_moe" (deepseek_v4) is no choice: the expert is a function of the token id."""
    return _positions(config, "mlp_layer_types", known=("dense", "sparse", "moe", "hash_moe"), wanted=("sparse", "moe"))


def _by_block_types(config: Config) -> Sequence[int]:
    """nemotron_h: a layer is a mixer, an MLP or a mixture of experts, never two of them."""
    known = ("mamba", "linear_attention", "attention", "full_attention", "sliding_attention", "mlp", "moe")
    return _positions(config, "layers_block_type", known=known, wanted=("moe",))


def _by_list(config: Config) -> Sequence[int]:
    """llama4: the config names them, having worked them out from `interleave_moe_layer_step`."""
    return sorted(config.moe_layers)


def _by_period(config: Config) -> Sequence[int]:
    """jamba. A single expert is an MLP."""
    period, offset = config.expert_layer_period, config.expert_layer_offset
    return [i for i in range(decoder_depth(config)) if i % period == offset and config.num_experts > 1]


def _by_interval(config: Config) -> Sequence[int]:
    """ernie4_5: each `moe_layer_interval`-th layer, counted from one, between two bounds that both belong."""
    first, last, interval = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    return [i for i in range(decoder_depth(config)) if (i + 1) % interval == 0 and first <= i <= last]


def _positions(config: Config, name: str, known: tuple[str, ...], wanted: tuple[str, ...]) -> Sequence[int]:
    kinds = setting(config, name)
    if kinds is None or len(kinds) != decoder_depth(config):
        raise not_understood(name, f"{decoder_depth(config)} names, one a layer", kinds)
    if strange := sorted(set(kinds).difference(known)):
        raise not_understood(name, f"names among {known}", strange)
    return [i for i, kind in enumerate(kinds) if kind in wanted]


LAYER_RULES: dict[str, LayerRule] = {
    "afmoe": _after_num_dense,
    "aria_text": _every_layer,
    "axk1": _by_mlp_types,
    "axk2": _by_mlp_types,
    "bailing_hybrid": _by_mlp_types,
    "beam": _by_mlp_types,
    "cohere2_moe": _by_mlp_types,
    "dbrx": _every_layer,
    "deepseek_ocr2_text": _by_mlp_types,
    "deepseek_v2": _after_first_k_dense,
    "deepseek_v3": _after_first_k_dense,
    "deepseek_v32": _by_mlp_types,
    "deepseek_v4": _by_mlp_types,
    "dots1": _after_first_k_dense,
    "ernie4_5_moe": _by_interval,
    "exaone_moe": _by_mlp_types,
    "flex_olmo": _every_layer,
    "flint": _by_sparse_step,
    "gemma4_text": _every_layer_if_enabled,
    "glm4_moe": _after_first_k_dense,
    "glm4_moe_lite": _by_mlp_types,
    "glm4v_moe_text": _after_first_k_dense,
    "Glm4vMoe_text": _after_first_k_dense,  # as release 4 spells it
    "glm5_next_text": _by_mlp_types,
    "glm_moe_dsa": _by_mlp_types,
    "gpt_oss": _every_layer,
    "granitemoe": _every_layer,
    "granitemoe_swa": _every_layer,
    "granitemoehybrid": _every_layer,
    "granitemoeshared": _every_layer,
    "hunyuan_v1_moe": _every_layer,
    "hy_v3": _by_mlp_types,
    "hy_v4": _by_mlp_types,
    "inkling_text": _by_mlp_types,
    "jamba": _by_period,
    "jetmoe": _every_layer,  # and once more in its attention: see MoeTopology
    "kimi_linear": _by_mlp_types,
    "kolibri1": _every_layer,
    "laguna": _by_mlp_types,
    "lfm2_moe": _after_num_dense,
    "llama4_text": _by_list,
    "longcat_flash": _every_layer,
    "mellum": _by_mlp_types,
    "mimo_v2_flash": _by_mlp_types,
    "minimax": _every_layer,
    "minimax_m2": _every_layer,
    "minimax_m3_vl_text": _by_mlp_types,
    "mistral4": _after_first_k_dense,
    "mistral_large4_text": _by_mlp_types,
    "mixtral": _every_layer,
    "muse_spark_text": _by_mlp_types,
    "nemotron_h": _by_block_types,
    "olmoe": _every_layer,
    "openai_privacy_filter": _every_layer,
    "qwen2_moe": _by_sparse_step,
    "qwen3_5_moe_text": _every_layer,
    "qwen3_moe": _by_sparse_step,
    "qwen3_next": _by_sparse_step,
    "qwen3_omni_moe_talker_text": _every_layer,
    "qwen3_omni_moe_text": _by_sparse_step,
    "qwen3_vl_moe_text": _by_sparse_step,
    "qwen4_exp_text": _every_layer,
    "solar_open": _every_layer,
    "step3p5": _by_mlp_types,
    "unlimited_ocr_text": _by_mlp_types,
    "zaya": _every_layer,
}
