"""Which layers route: what each way of writing it means, what is refused, and what is not guessed at."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_replay.errors import UnsupportedRouterError
from moe_replay.replay.site import RouterSite
from moe_replay.routes.router_families import REFUSED_ROUTERS, ROUTER_FAMILIES
from moe_replay.routes.topology import ATTENTION_ROUTER, MoeLayer, MoeTopology
from tests.replay.adapters.families import FAMILIES, RELEASE, available_families, model_from_config, tiny_config

FEWEST_FAMILIES = {4: 26, 5: 64}


def layers_of(config: Any) -> tuple[int, ...]:
    return MoeTopology.from_config(config).layers


def needs(*families: str) -> list[Any]:
    """Parameters for those of the families that this release has."""
    found = [family for family in families if family in available_families()]
    return found or [pytest.param(families[0], marks=pytest.mark.skip(reason="a family of a later release"))]


def sparse_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """The layers of the real model that have experts, found without the code under test."""
    with torch.device("meta"):
        model = model_from_config(config)
    # granitemoe keeps its experts in two plain modules in release 4
    names = [name for name, _ in model.named_modules() if name.endswith((".experts", ".block_sparse_moe"))]
    numbered = [next(part for part in name.split(".") if part.isdigit()) for name in names]
    return tuple(sorted({int(number) for number in numbered}))


# ---- the families -----------------------------------------------------------------------------------------------


def test_no_family_is_lost() -> None:
    assert len(available_families()) >= FEWEST_FAMILIES[RELEASE], transformers.__version__


def test_every_rule_is_for_a_family_under_test() -> None:
    other_names = {
        "Glm4vMoe_text",
        "qwen3_omni_moe_talker_text",
    }  # see replay/adapters/test_discovery.py
    assert ROUTER_FAMILIES.keys() - other_names == FAMILIES.keys()


def test_every_mixture_of_the_installed_release_is_known_or_refused() -> None:
    refused = {model_type for refusal in REFUSED_ROUTERS for model_type in refusal.model_types}
    no_router = {"vitpose_backbone"}  # its experts are chosen by the name of a dataset
    found = mixtures_of_the_installed_release()
    assert len(found) >= FEWEST_FAMILIES[RELEASE]
    assert found - ROUTER_FAMILIES.keys() - refused - no_router == set()


def test_the_documentation_names_every_family_and_every_refusal() -> None:
    text = (Path(__file__).parents[2] / "docs" / "routers.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    named = {name.strip(",") for row in rows for name in row.split()}
    refused = {refusal.model_types[0] for refusal in REFUSED_ROUTERS}
    assert FAMILIES.keys() | refused <= named


def mixtures_of_the_installed_release() -> set[str]:
    """Every model type whose config has a number of experts, from the source of all configs."""
    package = Path(transformers.__file__).parent
    found = set()
    for path in package.glob("models/**/configuration_*.py"):
        if "experts" not in path.read_text():
            continue
        module = importlib.import_module(".".join(["transformers", *path.relative_to(package).with_suffix("").parts]))
        own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
        for config in own:
            if isinstance(config, type) and issubclass(config, PretrainedConfig) and config.model_type:
                fields = {*inspect.signature(config.__init__).parameters, *getattr(config, "__annotations__", ())}
                if any("experts" in field for field in fields if field[0] != "_"):
                    found.add(config.model_type)
    return found


@pytest.mark.parametrize("family", available_families())
def test_a_family_routes_where_its_model_has_experts(family: str) -> None:
    config = tiny_config(family)
    topology = MoeTopology.from_config(config)
    assert topology.model_type == config.model_type
    in_mlp = tuple(layer for layer in topology.layers if layer < ATTENTION_ROUTER)
    if family in ("jetmoe", "deepseek_v4"):  # without a module named experts; with experts chosen by token id
        assert in_mlp == {"jetmoe": (0, 1, 2), "deepseek_v4": (1, 3)}[family]
    else:
        assert in_mlp == sparse_layers(config)


# ---- each way of writing it, against the real model ---------------------------------------------------------------

DEPTH = st.integers(1, 7)


@pytest.mark.parametrize("family", needs("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "flint"))
@given(depth=DEPTH, step=st.integers(1, 4), dense=st.sets(st.integers(0, 7)))
@settings(max_examples=12)
def test_sparse_step_and_explicit_dense_layers(family: str, depth: int, step: int, dense: set[int]) -> None:
    types = {"layer_types": ["full_attention"] * depth} if family == "qwen3_next" else {}
    config = tiny_config(
        family, num_hidden_layers=depth, decoder_sparse_step=step, mlp_only_layers=sorted(dense), **types
    )
    check_against_model(config)


@pytest.mark.parametrize("family", needs("deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "mistral4"))
@given(depth=DEPTH, dense=st.integers(0, 8))
@settings(max_examples=12)
def test_dense_layers_first(family: str, depth: int, dense: int) -> None:
    types = {"layer_types": ["full_attention"] * depth} if family == "dots1" else {}
    check_against_model(tiny_config(family, num_hidden_layers=depth, first_k_dense_replace=dense, **types))


@pytest.mark.parametrize("family", needs("afmoe", "lfm2_moe"))
@given(depth=DEPTH, dense=st.integers(0, 8))
@settings(max_examples=12)
def test_a_number_of_dense_layers(family: str, depth: int, dense: int) -> None:
    types = ["full_attention"] * depth
    check_against_model(tiny_config(family, num_hidden_layers=depth, num_dense_layers=dense, layer_types=types))


@pytest.mark.parametrize("family", needs("axk1", "exaone_moe", "glm4_moe_lite", "hy_v3", "laguna", "mellum"))
@given(kinds=st.lists(st.sampled_from(["dense", "sparse"]), min_size=1, max_size=7))
@settings(max_examples=12)
def test_a_name_for_each_layer(family: str, kinds: list[str]) -> None:
    types = {"layer_types": ["full_attention"] * len(kinds)} if family == "exaone_moe" else {}
    check_against_model(tiny_config(family, num_hidden_layers=len(kinds), mlp_layer_types=kinds, **types))


@pytest.mark.parametrize("family", needs("nemotron_h"))
@given(kinds=st.lists(st.sampled_from(["linear_attention", "full_attention", "mlp", "moe"]), min_size=1, max_size=7))
@settings(max_examples=12)
def test_a_block_for_each_layer(family: str, kinds: list[str]) -> None:
    check_against_model(tiny_config(family, layers_block_type=kinds))


@pytest.mark.parametrize("family", needs("llama4_text"))
@given(depth=DEPTH, step=st.integers(1, 4))
@settings(max_examples=12)
def test_interleaved_layers(family: str, depth: int, step: int) -> None:
    check_against_model(tiny_config(family, num_hidden_layers=depth, interleave_moe_layer_step=step))


@pytest.mark.parametrize("family", needs("jamba"))
@given(depth=DEPTH, period=st.integers(1, 4), offset=st.integers(0, 3), experts=st.sampled_from([1, 2, 4]))
@settings(max_examples=12)
def test_a_period_and_an_offset(family: str, depth: int, period: int, offset: int, experts: int) -> None:
    config = tiny_config(
        family,
        num_hidden_layers=depth,
        num_experts=experts,
        expert_layer_period=period,
        expert_layer_offset=offset % period,
        attn_layer_period=1,
        attn_layer_offset=0,
    )
    check_against_model(config)


@given(data=st.data())
@settings(max_examples=10)
def test_an_interval_between_bounds(data: st.DataObject) -> None:
    sparse = data.draw(st.integers(0, 6), "a sparse layer")  # release 4 cannot build this family without one
    config = tiny_config(
        "ernie4_5_moe",
        num_hidden_layers=data.draw(st.integers(sparse + 1, 8), "depth"),
        moe_layer_start_index=data.draw(st.integers(0, sparse), "first"),
        moe_layer_end_index=data.draw(st.integers(sparse, 8) | st.just(-1), "last"),
        moe_layer_interval=data.draw(st.sampled_from([i for i in range(1, 8) if (sparse + 1) % i == 0]), "interval"),
    )
    assert sparse in layers_of(config)
    check_against_model(config)


def check_against_model(config: PretrainedConfig) -> None:
    expected = sparse_layers(config)
    if expected:
        assert layers_of(config) == expected
    else:
        with pytest.raises(UnsupportedRouterError, match="has no routers"):
            layers_of(config)


# ---- odd families -------------------------------------------------------------------------------------------------


def test_jetmoe_routes_in_its_attention_too() -> None:
    topology = MoeTopology.from_config(tiny_config("jetmoe"))
    assert topology.layers == (0, 1, 2, 65536, 65537, 65538)
    assert (topology.num_layers, topology.num_experts, topology.top_k) == (3, 6, 2)


def test_longcat_counts_decoder_layers_and_zero_experts() -> None:
    topology = MoeTopology.from_config(tiny_config("longcat_flash"))
    assert (topology.num_layers, topology.layers) == (2, (0, 1))
    assert (topology.num_experts, topology.top_k) == (6 + 2, 3)


@pytest.mark.parametrize("family", needs("zaya"))
def test_zaya_has_a_skip_expert(family: str) -> None:
    assert MoeTopology.from_config(tiny_config(family)).num_experts == 6 + 1


@pytest.mark.parametrize("family", needs("deepseek_v4"))
def test_layers_routed_by_token_id_are_left_out(family: str) -> None:
    assert layers_of(tiny_config(family)) == (1, 3)


def test_top_k_may_differ_from_layer_to_layer() -> None:
    topology = MoeTopology.from_config(tiny_config("hunyuan_v1_moe", moe_topk=[1, 2, 3]))
    assert [moe.top_k for moe in topology.moe_layers] == [1, 2, 3]
    assert topology.num_experts == 6
    with pytest.raises(UnsupportedRouterError, match=r"top_k is not the same in every layer.*\{0: 1, 1: 2, 2: 3\}"):
        _ = topology.top_k


def test_a_list_of_another_length_is_an_error() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"expected 3 numbers, one a layer, found \[1, 2\]"):
        MoeTopology.from_config(tiny_config("hunyuan_v1_moe", moe_topk=[1, 2]))


# ---- dense, refused, unknown ----------------------------------------------------------------------------------------


def test_a_dense_model_has_no_routers() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"the model \(llama\) has no routers.*train a dense model"):
        MoeTopology.from_config(CONFIG_MAPPING["llama"]())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"num_experts": 0}),
        ("qwen3_moe", {"decoder_sparse_step": 9}),
        ("granitemoehybrid", {"num_local_experts": 0}),
        *(("gemma4_text", {"enable_moe_block": False}) for family in available_families() if family == "gemma4_text"),
    ],
)
def test_a_sparse_family_may_be_dense(family: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedRouterError, match=rf"the model \({family}\) has no routers"):
        MoeTopology.from_config(tiny_config(family, **changes))


def test_doge_is_dense_unless_told_otherwise() -> None:
    with pytest.raises(UnsupportedRouterError, match="has no routers"):
        MoeTopology.from_config(CONFIG_MAPPING["doge"](is_moe=False))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("phimoe", "samples experts"),
        ("switch_transformers", "drops tokens above each expert's capacity"),
        ("nllb-moe", "drops tokens above each expert's capacity"),
        ("doge", "product keys"),
        *(("ernie4_5_vl_moe", "only the rows of its modality") for _ in range(RELEASE - 4)),
    ],
)
def test_refused_by_name_with_the_reason(model_type: str, reason: str) -> None:
    config = CONFIG_MAPPING[model_type](**({"is_moe": True} if model_type == "doge" else {}))
    with pytest.raises(UnsupportedRouterError, match=rf"^{model_type}\w* cannot be replayed: .*{reason}"):
        MoeTopology.from_config(config)


def test_an_unknown_mixture_is_not_guessed_at() -> None:
    config = PretrainedConfig(num_hidden_layers=4, num_experts=8, num_experts_per_tok=2)
    config.model_type = "mymoe"
    with pytest.raises(UnsupportedRouterError) as error:
        MoeTopology.from_config(config)
    assert "unknown mixture-of-experts model type 'mymoe'" in str(error.value)
    assert error.value.found == {"num_experts": 8, "num_experts_per_tok": 2}
    assert "topology=MoeTopology(num_layers, moe_layers)" in str(error.value)
    assert "docs/routers.md" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types cannot be understood: expected 2 names, one a layer"),
        ({"mlp_layer_types": ["sparse", "mixture"]}, r"names among .*, found \['mixture'\]"),
        ({"n_routed_experts": 9}, "num_experts / n_routed_experts cannot be understood: expected one number"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok / .* cannot be understood: expected one number"),
        ({"num_experts_per_tok": 9}, r"at most all of its experts \[layer 0\]: expected top_k from 1 to 8, found 9"),
    ],
)
def test_a_config_that_contradicts_itself(changes: dict[str, Any], text: str) -> None:
    good = {"model_type": "beam", "num_hidden_layers": 2, "mlp_layer_types": ["sparse"] * 2}
    config = SimpleNamespace(**good | {"num_experts": 8, "num_experts_per_tok": 2} | changes)
    with pytest.raises(UnsupportedRouterError, match=text):
        MoeTopology.from_config(config)


# ---- multimodal and Megatron configs --------------------------------------------------------------------------------


def test_the_text_config_inside_a_multimodal_one() -> None:
    inner = tiny_config("mixtral")
    topology = MoeTopology.from_config(CONFIG_MAPPING["llava"](text_config=inner))
    assert topology == MoeTopology.from_config(inner)
    assert topology.model_type == "mixtral"


def megatron(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"num_layers": 6, "num_moe_experts": 8, "moe_router_topk": 2, "moe_layer_freq": 1, "mtp_num_layers": 1}
        | changes
    )


@given(depth=st.integers(1, 12), period=st.integers(1, 13))
def test_a_megatron_period_counts_from_layer_zero(depth: int, period: int) -> None:
    topology = MoeTopology.from_config(megatron(num_layers=depth, moe_layer_freq=period))
    assert topology.layers == tuple(range(0, depth, period))
    assert (topology.num_layers, topology.num_experts, topology.top_k) == (depth, 8, 2)


@given(pattern=st.lists(st.integers(0, 1), min_size=1).filter(any))
def test_a_megatron_pattern_has_a_flag_for_each_layer(pattern: list[int]) -> None:
    topology = MoeTopology.from_config(megatron(num_layers=len(pattern), moe_layer_freq=pattern))
    assert topology.layers == tuple(i for i, flag in enumerate(pattern) if flag)
    assert topology.model_type == "megatron"


def test_a_megatron_pattern_of_another_length() -> None:
    with pytest.raises(UnsupportedRouterError, match="expected 6 flags, one a layer, found 2 flags"):
        MoeTopology.from_config(megatron(moe_layer_freq=[0, 1]))


def test_a_dense_megatron_model() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"the model \(megatron\) has no routers"):
        MoeTopology.from_config(megatron(num_moe_experts=None))


# ---- the value itself -----------------------------------------------------------------------------------------------


def site(layer: int, num_experts: int = 8, top_k: int = 2) -> RouterSite:
    return RouterSite(layer, f"layers.{layer}", nn.Identity(), num_experts, top_k)


@given(layers=st.permutations([1, 2, 5, ATTENTION_ROUTER + 1]))
def test_sites_in_any_order_give_one_topology(layers: list[int]) -> None:
    topology = MoeTopology.from_sites([site(layer) for layer in layers], 6, "some")
    assert topology == MoeTopology(6, tuple(MoeLayer(i, 8, 2) for i in (1, 2, 5, ATTENTION_ROUTER + 1)), "some")


@pytest.mark.parametrize(
    ("sites", "text"),
    [
        ([], "the model has no routers"),
        ([site(1), site(1)], r"layers of a topology must increase.*found \[1, 1\]"),
        ([site(6)], r"a router outside the decoder \[layer 6\]: expected a layer below 6"),
        ([site(-1)], "a router outside the decoder"),
        ([site(ATTENTION_ROUTER + 6)], "a router outside the decoder"),
        ([site(2 * ATTENTION_ROUTER)], "a router outside the decoder"),
        ([site(1, num_experts=4, top_k=5)], "expected top_k from 1 to 4, found 5"),
        ([site(1, top_k=0)], "expected top_k from 1 to 8, found 0"),
    ],
)
def test_topologies_that_cannot_be(sites: list[RouterSite], text: str) -> None:
    with pytest.raises(UnsupportedRouterError, match=text):
        MoeTopology.from_sites(sites, num_layers=6)


def test_expert_counts_may_differ_from_layer_to_layer() -> None:
    topology = MoeTopology.from_sites([site(0, 8), site(1, 16)], 2)
    with pytest.raises(UnsupportedRouterError, match=r"num_experts is not the same.*\{0: 8, 1: 16\}.*moe_layers"):
        _ = topology.num_experts
    assert topology.top_k == 2


def test_more_experts_than_ids_can_name() -> None:
    MoeTopology(1, (MoeLayer(0, 32768, 2),))
    with pytest.raises(UnsupportedRouterError, match="more experts than ids can name"):
        MoeTopology(1, (MoeLayer(0, 32769, 2),))
