"""Where routers are: in every family, inside every wrapper; and the errors where they are not."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moe_replay as mr
from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.adapters.transformers import RouterFamily, RouterRule, find_routers, topology_of
from moe_replay.replay.site import RouterSite
from moe_replay.routes.topology import ATTENTION_ROUTER, MoeLayer, MoeTopology
from tests.replay.adapters.families import RELEASE, available_families, tiny_config, tiny_inputs, tiny_model


def numbers(sites: list[RouterSite]) -> list[tuple[int, ...]]:
    """All that a site says, but where it is."""
    return [(s.layer, s.num_experts, s.top_k, s.num_groups, s.groups_kept) for s in sites]


# ---- every family -----------------------------------------------------------------------------------------------


class TopKLog(TorchFunctionMode):
    """Notes each top-k: the innermost module that was running, k, and the number of columns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.calls: list[tuple[nn.Module, int, int]] = []
        for module in model.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.running.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            k = args[1] if len(args) > 1 else kwargs["k"]
            self.calls.append((self.running[-1], k, scores.shape[-1]))
        return function(*args, **kwargs)


@pytest.mark.parametrize("family", available_families())
def test_a_site_is_where_the_choice_is_made(family: str) -> None:
    model = tiny_model(family)
    sites = find_routers(model)
    with torch.no_grad(), TopKLog(model) as log:
        model(**tiny_inputs(family))
    inside = {id(site.module): site for site in sites}
    calls_of_sites = {
        site.layer: [(k, columns) for module, k, columns in log.calls if module is site.module] for site in sites
    }
    for site in sites:
        *before, choice = calls_of_sites[site.layer]
        assert choice == (site.top_k, site.num_experts)
        assert ((site.groups_kept, site.num_groups) in before) == (site.num_groups > 0)
        assert not before or site.num_groups
        assert model.get_submodule(site.name) is site.module
    # No other module chooses experts; what is left chooses tokens, for sparse attention.
    others = {type(module).__name__ for module, _, _ in log.calls if id(module) not in inside}
    assert all("Indexer" in name for name in others), others


@pytest.mark.parametrize("family", available_families())
def test_live_routers_and_config_agree(family: str) -> None:
    model = tiny_model(family)
    promised = MoeTopology.from_config(model.config)
    sites = find_routers(model)
    assert MoeTopology.from_sites(sites, promised.num_layers, promised.model_type) == promised == topology_of(model)


def test_the_attention_router_of_jetmoe() -> None:
    names = {site.layer: site.name for site in find_routers(tiny_model("jetmoe"))}
    assert names[1] == "model.layers.1.mlp.router"
    assert names[ATTENTION_ROUTER + 1] == "model.layers.1.self_attention.experts.router"


def test_top_k_may_differ_from_layer_to_layer() -> None:
    sites = find_routers(tiny_model("hunyuan_v1_moe", moe_topk=[1, 2, 3]))
    assert [site.top_k for site in sites] == [1, 2, 3]


def test_groups_that_the_method_does_not_use() -> None:
    sites = find_routers(tiny_model("deepseek_v2", topk_method="greedy"))
    assert {(site.num_groups, site.groups_kept) for site in sites} == {(0, 0)}


def test_a_single_group_is_no_group() -> None:
    sites = find_routers(tiny_model("deepseek_v3", n_group=1, topk_group=1))
    assert {(site.num_groups, site.groups_kept) for site in sites} == {(0, 0)}


# ---- language models inside others ------------------------------------------------------------------------------

# model type of the whole -> family of its language model, other settings
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "aria": ("aria_text", {}),
    "deepseek_ocr2": ("deepseek_ocr2_text", {}),
    "gemma4": ("gemma4_text", {}),
    "glm4v_moe": ("glm4v_moe_text", {}),
    "glm5_next": ("glm5_next_text", {}),
    "inkling_mm_model": ("inkling_text", {}),
    "kimi_k25": ("deepseek_v3", {}),
    "llama4": ("llama4_text", {}),
    "llava": ("mixtral", {}),
    "minimax_m3_vl": ("minimax_m3_vl_text", {}),
    "mistral_large4": ("mistral_large4_text", {}),
    "muse_spark": ("muse_spark_text", {"audio_config": {"out_hidden_size": 32}}),
    "nemo_speechlm": ("nemotron_h", {}),
    "nemotron_h_omni": ("nemotron_h", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_text", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {}),
    "qwen4_exp": ("qwen4_exp_text", {}),
    "step3p7": ("step3p5", {}),
    "unlimited_ocr": ("unlimited_ocr_text", {}),
}


def multimodal_model(model_type: str) -> nn.Module:
    """The whole model, its towers at their full size, on no device."""
    family, settings = MULTIMODAL[model_type]
    text = tiny_config(family)
    config = CONFIG_MAPPING[model_type](text_config=text if RELEASE >= 5 else text.to_dict(), **settings)
    mappings = [
        getattr(modeling_auto, name, {})
        for name in ("MODEL_FOR_MULTIMODAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_MAPPING")
    ]
    model_class = next(mapping[type(config)] for mapping in mappings if type(config) in mapping)
    with torch.device("meta"):
        return model_class(config)


@pytest.mark.parametrize("model_type", [name for name in MULTIMODAL if name in CONFIG_MAPPING])
def test_the_language_model_inside(model_type: str) -> None:
    family, _ = MULTIMODAL[model_type]
    sites = find_routers(multimodal_model(model_type))
    assert numbers(sites) == numbers(find_routers(tiny_model(family)))
    assert all("language_model" in site.name for site in sites)


def test_no_multimodal_model_is_lost() -> None:
    assert len([name for name in MULTIMODAL if name in CONFIG_MAPPING]) >= {4: 5, 5: 20}[RELEASE]


def omni(name: str) -> Any:
    part = "configuration" if name.endswith("Config") else "modeling"
    return getattr(importlib.import_module(f"transformers.models.qwen3_omni_moe.{part}_qwen3_omni_moe"), name)


def tiny_talker() -> dict[str, Any]:
    text = tiny_config("qwen3_omni_moe_text", mlp_only_layers=[]).to_dict()
    return {name: value for name, value in text.items() if name != "model_type"} | {
        "shared_expert_intermediate_size": 16
    }


def test_the_routers_of_a_talker_are_not_those_of_the_decoder() -> None:
    thinker = {"text_config": tiny_config("qwen3_omni_moe_text").to_dict()}
    talker = {"text_config": tiny_talker(), "spatial_merge_size": 2}
    config = omni("Qwen3OmniMoeConfig")(thinker_config=thinker, talker_config=talker)
    with torch.device("meta"):
        model = omni("Qwen3OmniMoeForConditionalGeneration")(config)
    sites = find_routers(model)
    assert [site.layer for site in sites] == [0, 2]
    assert all(site.name.startswith("thinker.") for site in sites)
    assert [site.layer for site in find_routers(model.talker.model)] == [0, 1, 2]


def test_the_routers_of_draft_heads_are_not_those_of_the_decoder() -> None:
    model = tiny_model("deepseek_v3")
    expected = numbers(find_routers(model))
    model.mtp = nn.ModuleList([copy.deepcopy(model.model.layers[2])])
    assert numbers(find_routers(model)) == expected


def test_two_lists_that_could_be_the_decoder() -> None:
    model = tiny_model("deepseek_v3")
    model.model.drafts = copy.deepcopy(model.model.layers)
    with pytest.raises(UnsupportedRouterError, match=r"which module list is the decoder.*'model.drafts': 3"):
        find_routers(model)


# ---- wrappers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FAMILIES_TO_WRAP = ("qwen3_moe", "deepseek_v3", "jetmoe", "longcat_flash")


def check_same_routers(wrapped: nn.Module, expected: list[tuple[int, ...]]) -> None:
    sites = find_routers(wrapped)
    assert numbers(sites) == expected
    assert all(wrapped.get_submodule(site.name) is site.module for site in sites)


@pytest.mark.parametrize("family", FAMILIES_TO_WRAP)
@pytest.mark.usefixtures("process_group")
def test_sharded_layer_by_layer_and_router_by_router(family: str) -> None:
    model = tiny_model(family)
    plain = find_routers(model)
    expected = numbers(plain)
    for site in plain:
        fully_shard(site.module)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert type(plain[0].module).__name__.startswith("FSDP")
    check_same_routers(model, expected)


@pytest.mark.parametrize("family", FAMILIES_TO_WRAP)
@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel(family: str) -> None:
    model = tiny_model(family)
    expected = numbers(find_routers(model))
    check_same_routers(DistributedDataParallel(model), expected)


@pytest.mark.parametrize("family", FAMILIES_TO_WRAP)
def test_activation_checkpointing_of_layers(family: str) -> None:
    model = tiny_model(family)
    expected = numbers(find_routers(model))
    layers = set(model.model.layers)
    apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    check_same_routers(model, expected)


class Adapter(nn.Module):
    """Holds a model as PEFT does: two levels down, its attributes looked up through both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model["model"], name)


@pytest.mark.parametrize("family", FAMILIES_TO_WRAP)
@pytest.mark.parametrize("wrap", [Adapter, functools.partial(torch.compile, backend="eager")])
def test_models_held_by_others(family: str, wrap: Any) -> None:
    model = tiny_model(family)
    expected = numbers(find_routers(model))
    check_same_routers(wrap(model), expected)


# ---- what is refused ----------------------------------------------------------------------------------------------


def refused_model(model_type: str) -> nn.Module:
    small = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    seq2seq = {"vocab_size": 64, "d_model": 16, "num_layers": 2, "num_decoder_layers": 2, "num_experts": 4}
    settings: dict[str, dict[str, Any]] = {
        "phimoe": small | {"num_key_value_heads": 2, "intermediate_size": 16, "num_local_experts": 4},
        "doge": small | {"num_key_value_heads": 2, "intermediate_size": 16, "is_moe": True, "num_experts": 16},
        "switch_transformers": seq2seq | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        "nllb-moe": seq2seq | {"encoder_layers": 2, "decoder_layers": 2, "encoder_sparse_step": 2},
        "ernie4_5_vl_moe": {"text_config": {"num_hidden_layers": 2, "moe_num_experts": 4}},
        "diffusion_gemma": {"text_config": small | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    }
    config = CONFIG_MAPPING[model_type](**settings[model_type])
    with torch.device("meta"):
        return modeling_auto.MODEL_MAPPING[type(config)](config)


@pytest.mark.parametrize(
    ("model_type", "class_name", "reason"),
    [
        ("phimoe", "PhimoeSparseMoeBlock", "samples experts"),
        ("doge", "DogeCDMoE", "product keys"),
        ("switch_transformers", "SwitchTransformersTop1Router", "above each expert's capacity"),
        ("nllb-moe", "NllbMoeTop2Router", "above each expert's capacity"),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeBlock", "sees only the rows of its modality"),
        ("diffusion_gemma", "DiffusionGemmaTextRouter", "no single route"),
    ],
)
def test_refused_with_class_layer_and_reason(model_type: str, class_name: str, reason: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("a family of a later release")
    with pytest.raises(UnsupportedRouterError, match=rf"{class_name} cannot be replayed: .*{reason}") as error:
        find_routers(refused_model(model_type))
    assert error.value.layer in (0, 1)
    assert f"{error.value.layer}." in str(error.value.found)


def test_a_refused_router_in_an_unsuspected_model() -> None:
    model = tiny_model("mixtral")
    model.model.layers[1].mlp = type("PhimoeTopKRouter", (nn.Module,), {})()
    with pytest.raises(UnsupportedRouterError, match=r"PhimoeTopKRouter cannot be replayed.*\[layer 1\]"):
        find_routers(model)


# ---- routers that nobody has told us of ---------------------------------------------------------------------------


class StrangeGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_choices, self.n_picked = 6, 2
        self.linear = nn.Linear(8, 6)


class StrangeLayer(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"gate": StrangeGate()}) if sparse else nn.Linear(8, 8)


class StrangeModel(nn.Module):
    """A mixture-of-experts model that this library does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig(num_hidden_layers=3, num_experts=6, num_experts_per_tok=2)
        self.config.model_type = "strange"
        self.layers = nn.ModuleList(StrangeLayer(sparse) for sparse in (False, True, True))


STRANGE = MoeTopology(3, (MoeLayer(1, 6, 2), MoeLayer(2, 6, 2)))
STRANGE_RULE = RouterRule("StrangeGate", num_experts="n_choices", top_k="n_picked")


def test_an_unknown_model_type() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"unknown mixture-of-experts model type 'strange'.*topology="):
        find_routers(StrangeModel())


def test_an_unknown_router() -> None:
    with pytest.raises(UnsupportedRouterError) as error:
        find_routers(StrangeModel(), topology=STRANGE)
    assert error.value.layer == 1
    text = str(error.value)
    assert "mlp.gate: StrangeGate" in text
    assert "RouterRule(class_name=..., num_experts=..., top_k=...)" in text
    assert "docs/routers.md" in text
    assert "expected routers in layers [1, 2], found routers in layers []" in text


@pytest.mark.parametrize("rule", [STRANGE_RULE, RouterRule("StrangeGate", num_experts="linear.out_features", top_k=2)])
def test_the_recipe_of_the_documentation(rule: RouterRule) -> None:
    sites = find_routers(StrangeModel(), [rule], STRANGE)
    assert [(site.name, site.layer) for site in sites] == [("layers.1.mlp.gate", 1), ("layers.2.mlp.gate", 2)]
    assert numbers(sites) == [(1, 6, 2, 0, 0), (2, 6, 2, 0, 0)]


STRANGE_FAMILY = RouterFamily(lambda config: range(1, config.num_hidden_layers), (STRANGE_RULE,))


@pytest.mark.parametrize("family", [STRANGE_FAMILY, f"{__name__}:STRANGE_FAMILY"], ids=["object", "path"])
def test_a_family_of_the_user(family: RouterFamily | str) -> None:
    replay = mr.attach(StrangeModel(), family)
    assert replay.topology.layers == STRANGE.layers
    assert [site.name for site in replay.sites.values()] == ["layers.1.mlp.gate", "layers.2.mlp.gate"]


def test_a_family_with_other_names_of_settings() -> None:
    config = PretrainedConfig(num_hidden_layers=2, n_choices=6, n_picked=2)
    config.model_type = "strange"
    family = RouterFamily(lambda config: (1,), num_experts="n_choices", top_k="n_picked")
    assert MoeTopology.from_config(config, family).moe_layers == (MoeLayer(1, 6, 2),)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (f"{__name__}:NO_SUCH_FAMILY", "NO_SUCH_FAMILY"),
        ("no_such_family", "unknown router family"),
        (f"{__name__}:STRANGE", r"expected a RouterFamily or a list of RouterRule, found MoeTopology"),
    ],
)
def test_a_path_that_is_no_family(family: str, text: str) -> None:
    with pytest.raises(mr.MoeReplayError, match=text):
        mr.attach(StrangeModel(), family)


@pytest.mark.parametrize("field", ["num_experts", "top_k", "num_groups", "groups_kept"])
def test_a_rule_with_the_wrong_attribute(field: str) -> None:
    rule = RouterRule(**{"class_name": "StrangeGate", "num_experts": 6, "top_k": 2} | {field: "n_groups"})
    with pytest.raises(UnsupportedRouterError, match=r"does not fit layers.1.mlp.gate.*'n_choices': 6, 'n_picked': 2"):
        find_routers(StrangeModel(), [rule], STRANGE)


def test_a_rule_with_the_wrong_number() -> None:
    rule = RouterRule("StrangeGate", num_experts="n_choices", top_k=3)
    with pytest.raises(
        UnsupportedRouterError, match=r"disagree \[layer 1\]: expected top 2 of 6 experts, found top 3 of 6"
    ):
        find_routers(StrangeModel(), [rule], STRANGE)


def test_a_rule_of_the_user_comes_before_ours() -> None:
    model = tiny_model("mixtral")
    block = "MixtralSparseMoeBlock"
    sites = find_routers(model, [RouterRule(block, num_experts=6)])
    assert {type(site.module).__name__ for site in sites} == {block}
    assert len(sites) == 3


def test_a_model_without_a_config() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"the model has no config.*found Sequential.*topology="):
        find_routers(nn.Sequential(nn.Linear(2, 2)))


# ---- models that are not what their config says -------------------------------------------------------------------


def test_a_config_changed_after_the_model_was_built() -> None:
    model = tiny_model("qwen2_moe")  # layer 1 is dense
    model.config.mlp_only_layers = [1, 2]
    with pytest.raises(
        UnsupportedRouterError, match=r"calls dense \[layer 2\]: expected layers \[0\], found layers \[0, 2\]"
    ):
        find_routers(model)
    model.config.mlp_only_layers = []
    with pytest.raises(UnsupportedRouterError, match=r"no router found.*\[layer 1\].*\[0, 1, 2\].*found.*\[0, 2\]"):
        find_routers(model)


def test_another_number_of_experts_than_the_config_says() -> None:
    model = tiny_model("qwen2_moe")
    model.config.num_experts = 8
    with pytest.raises(UnsupportedRouterError, match=r"\[layer 0\]: expected top 2 of 8 experts, found top 2 of 6"):
        find_routers(model)


def test_layers_that_were_moved() -> None:
    model = tiny_model("mixtral")
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    with pytest.raises(UnsupportedRouterError, match=r"at position 0 of the decoder but has layer index 2"):
        find_routers(model)


def test_layers_that_were_dropped() -> None:
    model = tiny_model("mixtral")
    del model.model.layers[1]
    with pytest.raises(UnsupportedRouterError, match=r"expected one list of 3 layers, found \{'model.layers': 2"):
        find_routers(model)


def routers_of(model: PreTrainedModel) -> dict[int, RouterSite]:
    return {site.layer: site for site in find_routers(model)}


def parent_of(model: nn.Module, site: RouterSite) -> tuple[nn.Module, str]:
    outer, _, own = site.name.rpartition(".")
    return model.get_submodule(outer), own


def test_one_router_for_two_layers() -> None:
    model = tiny_model("llama4_text")
    sites = routers_of(model)
    parent, own = parent_of(model, sites[3])
    setattr(parent, own, sites[1].module)
    with pytest.raises(
        UnsupportedRouterError, match=r"one router serves two layers.*\[layer 3\].*layers\.1.*layers\.3"
    ):
        find_routers(model)


def test_a_copy_of_a_router_beside_it() -> None:
    model = tiny_model("llama4_text")
    site = routers_of(model)[1]
    parent, _ = parent_of(model, site)
    parent.original_module = copy.deepcopy(site.module)
    with pytest.raises(UnsupportedRouterError, match=r"two routers in one layer \[layer 1\].*modules_to_save"):
        find_routers(model)
