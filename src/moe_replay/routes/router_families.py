"""The families of Transformers models whose routers can be replayed: which layers route, and which modules are routers.

Adding a family is one entry in `ROUTER_FAMILIES`; a family of one's own is passed to `attach` (docs/routers.md). A
setting is never trusted merely because it is present: published configs carry settings that the code of their model
ignores. A model type is in the table because its code was read and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_replay.errors import UnsupportedRouterError
from moe_replay.routes.layer_rules import (
    Config,
    after_first_k_dense,
    after_num_dense,
    by_block_types,
    by_interval,
    by_list,
    by_mlp_types,
    by_period,
    by_sparse_step,
    every_layer,
    every_layer_if_enabled,
)
from moe_replay.utils.plugins import resolve


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
    found = resolve(name, ROUTER_FAMILIES, kind="router family", key=key)
    if not isinstance(found, RouterFamily):
        raise UnsupportedRouterError(
            f"{key} = {name!r} is not a description of routers",
            expected="a RouterFamily",
            found=type(found).__name__,
            remedy="See docs/extending.md for an example",
        )
    return found
