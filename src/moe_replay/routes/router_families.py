"""The families of Transformers models whose routers can be replayed: which layers route, and which modules are routers.

Adding a family is one entry in `ROUTER_FAMILIES`; your own family is passed to `attach` (docs/routers.md). A
setting is never trusted merely because it is present: published configs carry settings that the code of their model
ignores. A model type is in the table because its code was read and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_replay.errors import UnsupportedRouterError
from moe_replay.utils.plugins import resolve

# ---- decoder layers that route, by a family's config -----------------------------------------------------------------

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
    return _positions(config, "mlp_layer_types", known=("dense", "sparse", "moe", "hash_moe"), sparse=("sparse", "moe"))


def by_block_types(config: Config) -> Sequence[int]:
    """Return the layers of type "moe": a layer is a mixer, an MLP or a mixture of experts (nemotron_h)."""
    known = ("mamba", "linear_attention", "attention", "full_attention", "sliding_attention", "mlp", "moe")
    return _positions(config, "layers_block_type", known=known, sparse=("moe",))


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


def _positions(config: Config, name: str, known: tuple[str, ...], sparse: tuple[str, ...]) -> Sequence[int]:
    kinds = setting(config, name)
    if kinds is None or len(kinds) != decoder_depth(config):
        raise not_understood(name, f"{decoder_depth(config)} names, one a layer", kinds)
    if unknown := sorted(set(kinds).difference(known)):
        raise not_understood(name, f"names among {known}", unknown)
    return [i for i, kind in enumerate(kinds) if kind in sparse]


# ---- families --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouterRule:
    """Rule that recognises a router by its class, and says where its numbers are.

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


@dataclass(frozen=True, slots=True)
class RouterFamily:
    """The routers of one family of Transformers models.

    sparse_layers  config -> decoder indices of the layers that route
    routers        how their modules are recognised; empty where the model's class names them in `_can_record_outputs`
    num_experts    the setting of the config with the number of experts; empty: one of the usual names
    top_k          the same for the experts chosen per token
    """

    sparse_layers: Callable[[Config], Sequence[int]]
    routers: tuple[RouterRule, ...] = ()
    num_experts: str = ""
    top_k: str = ""


def _grouped(class_name: str) -> RouterRule:
    return RouterRule(class_name, "n_routed_experts", num_groups="n_group", groups_kept="topk_group")


# The rules of modules are those of Transformers 4 where the comment does not say otherwise. Release 5 names its router
# classes in `_can_record_outputs`, and where it has the same class, the module inside it is the router.
ROUTER_FAMILIES: dict[str, RouterFamily] = {
    "afmoe": RouterFamily(after_num_dense),
    "aria_text": RouterFamily(
        every_layer, (RouterRule("AriaTextMoELayer", num_experts="config.moe_num_experts", top_k="config.moe_topk"),)
    ),
    "axk1": RouterFamily(by_mlp_types),
    "axk2": RouterFamily(by_mlp_types),
    "bailing_hybrid": RouterFamily(by_mlp_types),
    "beam": RouterFamily(by_mlp_types),
    "cohere2_moe": RouterFamily(by_mlp_types),
    "dbrx": RouterFamily(
        every_layer,
        (
            # Release 5: its router module makes the logits, not the choice.
            RouterRule("DbrxFFN", num_experts="router.layer.out_features"),
            RouterRule("DbrxRouter", num_experts="moe_num_experts", top_k="moe_top_k"),
        ),
    ),
    "deepseek_ocr2_text": RouterFamily(by_mlp_types),
    "deepseek_v2": RouterFamily(
        after_first_k_dense, (RouterRule("DeepseekV2MoEGate", num_groups="num_group", groups_kept="topk_group"),)
    ),
    "deepseek_v3": RouterFamily(after_first_k_dense, (_grouped("DeepseekV3TopkRouter"),)),
    "deepseek_v32": RouterFamily(by_mlp_types),
    "deepseek_v4": RouterFamily(by_mlp_types),
    "dots1": RouterFamily(after_first_k_dense, (_grouped("Dots1TopkRouter"),)),
    "ernie4_5_moe": RouterFamily(by_interval),
    "exaone_moe": RouterFamily(by_mlp_types),
    "flex_olmo": RouterFamily(every_layer),
    "flint": RouterFamily(by_sparse_step),
    "gemma4_text": RouterFamily(
        every_layer_if_enabled,
        (RouterRule("Gemma4TextRouter", num_experts="config.num_experts", top_k="config.top_k_experts"),),
    ),
    "glm4_moe": RouterFamily(after_first_k_dense, (_grouped("Glm4MoeTopkRouter"),)),
    "glm4_moe_lite": RouterFamily(by_mlp_types),
    "glm4v_moe_text": RouterFamily(after_first_k_dense, (_grouped("Glm4vMoeTextTopkRouter"),)),
    "Glm4vMoe_text": RouterFamily(after_first_k_dense),  # as release 4 spells it
    "glm5_next_text": RouterFamily(by_mlp_types),
    "glm_moe_dsa": RouterFamily(by_mlp_types),
    "gpt_oss": RouterFamily(every_layer),
    "granitemoe": RouterFamily(every_layer, (RouterRule("GraniteMoeTopKGating"),)),
    "granitemoe_swa": RouterFamily(every_layer),
    "granitemoehybrid": RouterFamily(every_layer, (RouterRule("GraniteMoeHybridTopKGating"),)),
    "granitemoeshared": RouterFamily(every_layer, (RouterRule("GraniteMoeSharedTopKGating"),)),
    "hunyuan_v1_moe": RouterFamily(every_layer, (RouterRule("HunYuanMoEV1Moe"),)),
    "hy_v3": RouterFamily(by_mlp_types),
    "hy_v4": RouterFamily(by_mlp_types),
    "inkling2_text": RouterFamily(every_layer),
    "inkling_text": RouterFamily(by_mlp_types),
    "jamba": RouterFamily(by_period, (RouterRule("JambaSparseMoeBlock"),)),
    "jetmoe": RouterFamily(
        every_layer,  # and once more in its attention: see MoeTopology
        (RouterRule("JetMoeTopKGating"),),
    ),
    "kimi_linear": RouterFamily(by_mlp_types),
    "kolibri1": RouterFamily(every_layer),
    "laguna": RouterFamily(by_mlp_types),
    "lfm2_moe": RouterFamily(after_num_dense),
    "llama4_text": RouterFamily(by_list, (RouterRule("Llama4Router"),)),
    "longcat_flash": RouterFamily(
        every_layer,
        (
            RouterRule("LongcatFlashTopkRouter", num_experts="n_routed_experts"),  # zero-experts included
        ),
    ),
    "mellum": RouterFamily(by_mlp_types),
    "mimo_v2_flash": RouterFamily(by_mlp_types),
    "minimax": RouterFamily(every_layer),
    "minimax_m2": RouterFamily(every_layer),
    "minimax_m3_vl_text": RouterFamily(by_mlp_types),
    "mistral4": RouterFamily(after_first_k_dense),
    "mistral_large4_text": RouterFamily(by_mlp_types),
    "mixtral": RouterFamily(every_layer),
    "muse_spark_text": RouterFamily(by_mlp_types),
    "nemotron_h": RouterFamily(by_block_types),
    "olmoe": RouterFamily(every_layer, (RouterRule("OlmoeSparseMoeBlock"),)),
    "openai_privacy_filter": RouterFamily(every_layer),
    "qwen2_moe": RouterFamily(by_sparse_step, (RouterRule("Qwen2MoeSparseMoeBlock"),)),
    "qwen3_5_moe_text": RouterFamily(every_layer),
    "qwen3_moe": RouterFamily(by_sparse_step),
    "qwen3_next": RouterFamily(by_sparse_step),
    "qwen3_omni_moe_talker_text": RouterFamily(every_layer),
    "qwen3_omni_moe_text": RouterFamily(by_sparse_step),
    "qwen3_vl_moe_text": RouterFamily(by_sparse_step),
    "qwen4_exp_text": RouterFamily(every_layer),
    "solar_open": RouterFamily(every_layer),
    "step3p5": RouterFamily(by_mlp_types),
    "unlimited_ocr_text": RouterFamily(by_mlp_types),
    "zaya": RouterFamily(
        every_layer,
        (
            RouterRule("ZayaRouter", num_experts="num_router_classes"),  # the skip expert included
        ),
    ),
}


def load_router_family(name: str | None, *, key: str = "model.router_family") -> RouterFamily | None:
    """Return the family called `name`: a model type of `ROUTER_FAMILIES`, or `module:name`; None stays None."""
    if name is None:
        return None
    family = resolve(name, ROUTER_FAMILIES, kind="router family", key=key)
    if not isinstance(family, RouterFamily):
        raise UnsupportedRouterError(
            f"{key} = {name!r} is not a description of routers",
            expected="a RouterFamily",
            found=type(family).__name__,
            remedy="See docs/extending.md for an example",
        )
    return family


# ---- routers that cannot be replayed: refused by name, before any forward --------------------------------------------


@dataclass(frozen=True, slots=True)
class RefusedRouter:
    """One kind of router that is refused: by the config's `model_type` or by the class of a live module."""

    model_types: tuple[str, ...]
    class_names: tuple[str, ...]
    reason: str


REFUSED_ROUTERS = (
    RefusedRouter(
        ("phimoe",),
        ("PhimoeTopKRouter", "PhimoeSparseMoeBlock"),
        "its router samples experts (sparsemixer) and zeroes the gates of those below a threshold, "
        "so a replayed expert could get no weight",
    ),
    RefusedRouter(
        ("switch_transformers", "nllb-moe", "gptsan-japanese"),
        ("SwitchTransformersTop1Router", "NllbMoeTop2Router", "GPTSanJapaneseTop1Router"),
        "its router drops tokens above each expert's capacity, so a replayed token could reach no expert",
    ),
    RefusedRouter(
        ("doge",),
        ("DogeCDMoE",),
        "its router chooses product keys: the top-k holds positions in an order made for each token, not expert ids",
    ),
    RefusedRouter(
        ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
        ("Ernie4_5_VLMoeMoeBlock",),
        "each of its layers has a text and a vision router, and each sees only the rows of its modality",
    ),
    RefusedRouter(
        ("dots3_note", "dots3_note_text", "dots3_note_vision_encoder"),
        ("Dots3NoteTextTopkRouter", "Dots3NoteVisionTopKRouter"),
        "its image encoder routes as well, in rows of image patches that no engine records",
    ),
    RefusedRouter(
        ("diffusion_gemma", "diffusion_gemma_text"),
        ("DiffusionGemmaTextRouter",),
        "it denoises blocks of tokens in many passes, and encoder and decoder both route: a token has no single route",
    ),
)


def refusal_by_type(model_type: str) -> RefusedRouter | None:
    return next((refusal for refusal in REFUSED_ROUTERS if model_type in refusal.model_types), None)


def refusal_by_class(class_names: Iterable[str]) -> RefusedRouter | None:
    """Return the refusal of a module, if any, by the names of its class and the class's bases."""
    names = set(class_names)
    return next((refusal for refusal in REFUSED_ROUTERS if names.intersection(refusal.class_names)), None)
