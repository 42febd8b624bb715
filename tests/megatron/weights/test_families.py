"""Families: what a config becomes, and what is refused because Megatron-Core would compute something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from moe_replay.megatron import weights
from moe_replay.megatron.weights.deepseek_v3 import prediction_layers
from moe_replay.megatron.weights.family import rope_parameters
from moe_replay.megatron.weights.tensor_slices import WeightMapError
from moe_replay.utils.plugins import PluginError
from tests.megatron.weights.models import VARIANTS

pytest.importorskip("transformers")


def settings_of(variant: str, **changes: Any) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING, AutoConfig

    family, settings = VARIANTS[variant]
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this release of Transformers has no {family}")
    if family == "gpt_oss":  # whose activation is Megatron-Core's
        pytest.importorskip("megatron.core")
    return weights.family_of(family).settings(AutoConfig.for_model(family, **(settings | changes)))


def test_rotary_settings_of_release_4_are_complete() -> None:
    """Where release 5 has one dictionary, 4.57 has a separate factor beside base and scaling."""
    glm = SimpleNamespace(rope_theta=1e6, rope_scaling=None, partial_rotary_factor=0.5)
    assert rope_parameters(glm) == {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}
    scaled = SimpleNamespace(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0})
    assert rope_parameters(scaled) == {"rope_theta": 1e4, "rope_type": "linear", "type": "linear", "factor": 2.0}


def test_dense_layers_are_counted() -> None:
    assert settings_of("qwen3_moe")["moe_layer_freq"] == [0, 1, 1, 1]
    assert settings_of("qwen3_moe-every-second")["moe_layer_freq"] == [0, 1, 0, 1]
    assert settings_of("deepseek_v3", first_k_dense_replace=2)["moe_layer_freq"] == [0, 0, 1, 1]
    assert settings_of("mixtral")["moe_layer_freq"] == [1, 1, 1, 1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_replay_is_on_and_nothing_drops_tokens(variant: str) -> None:
    settings = settings_of(variant)
    assert settings["moe_enable_routing_replay"]
    assert "moe_expert_capacity_factor" not in settings


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_models_whose_attention_an_indexer_selects_are_refused(model_type: str) -> None:
    with pytest.raises(WeightMapError, match=rf"{model_type} is not trained.*indexer.*not replayed.*backend.kind = "):
        weights.family_of(model_type)


def test_norms_that_transformer_engine_has_fused_keep_their_epsilon() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from moe_replay.megatron.weights.deepseek_v3 import set_latent_norms

    attention = MLASelfAttention.__new__(MLASelfAttention)
    nn.Module.__init__(attention)
    attention.q_layernorm = attention.kv_layernorm = IdentityOp()
    attention.config = SimpleNamespace(layernorm_epsilon=1e-6)  # type: ignore[assignment]
    set_latent_norms(nn.ModuleList([attention]))
    attention.config = SimpleNamespace(layernorm_epsilon=1e-5)  # type: ignore[assignment]
    with pytest.raises(WeightMapError, match=r"epsilon.*rms_norm_eps 1e-06, or layers without.*found 1e-05"):
        set_latent_norms(nn.ModuleList([attention]))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"hidden_act": "gelu"}, r"expected hidden_act 'silu', found 'gelu'"),
    ("qwen3_moe", {"attention_bias": True}, r"attention_bias False or None, found True"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, r"sliding_window None, found 8"),
    (
        "qwen3_moe",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        r"expected rope_type 'default', found 'linear'",
    ),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}, r"sliding_window None, found 8"),
    ("glm4_moe", {"norm_topk_prob": False}, r"normalizes the gate weights.*norm_topk_prob False"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha 1\.702, found 1\.5"),
    ("gpt_oss", {"attention_bias": False}, r"attention_bias True, found False"),
    ("gpt_oss", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, r"gpt-oss's.*'linear'"),
    ("mixtral", {"sliding_window": 4096}, r"sliding_window None, found 4096"),
    ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv None, found 8\.0"),
    ("deepseek_v3", {"rope_interleave": False}, r"rope_interleave True, found False"),
    ("deepseek_v3", {"norm_topk_prob": False}, r"normalizes the gate weights.*norm_topk_prob False"),
    ("deepseek_v3", {"num_experts_per_tok": 2}, r"expected num_experts_per_tok // topk_group 2, found 2 // 2"),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        r"not DeepSeek's.*'linear'",
    ),
]


@pytest.mark.parametrize(
    ("variant", "changes", "message"), REFUSED, ids=[f"{v}-{next(iter(c))}" for v, c, _ in REFUSED]
)
def test_what_would_be_another_model_is_refused(variant: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightMapError, match=message):
        settings_of(variant, **changes)


def test_enums_of_megatron_core_are_given_by_name() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moe_replay.megatron.weights.model import _enum_settings

    found = _enum_settings(TransformerConfig, {"attention_backend": "flash", "num_layers": 2})
    assert found == {"attention_backend": AttnBackend.flash}
    with pytest.raises(WeightMapError, match=r"attention_backend: expected flash, .*auto.*found 'flsh'"):
        _enum_settings(TransformerConfig, {"attention_backend": "flsh"})


def test_an_unknown_family_says_what_exists() -> None:
    with pytest.raises(
        WeightMapError, match=r"deepseek_v3, .*, mixtral, olmoe, .*, qwen3_moe.*found 'jamba'.*megatron\.md"
    ):
        weights.family_of("jamba")


def test_prediction_layers_come_after_the_decoder() -> None:
    pattern = prediction_layers({"num_hidden_layers": 61, "num_nextn_predict_layers": 1})
    assert pattern is not None
    assert pattern.match("model.layers.61.eh_proj.weight")
    assert not pattern.match("model.layers.6.mlp.gate.weight")
    assert not pattern.match("model.layers.610.mlp.gate.weight")
    assert prediction_layers({"num_hidden_layers": 61}) is None


@pytest.mark.parametrize("model_type", weights.WEIGHT_MAPS)
def test_every_registered_family_can_be_imported(model_type: str) -> None:
    assert isinstance(weights.family_of(model_type), weights.Family)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context_parallel_size": 2}, "gated delta net.*expected context_parallel_size 1, found 2"),
        ({"tensor_model_parallel_size": 4}, "divisible by tensor_model_parallel_size 4, found 2 and 2"),
    ],
    ids=str,
)
def test_layouts_without_a_delta_net_are_refused(settings: dict[str, Any], message: str) -> None:
    from moe_replay.megatron.weights.qwen3_next import _check

    plain = {"tensor_model_parallel_size": 2, "context_parallel_size": 1}
    config = SimpleNamespace(linear_num_key_heads=2, num_query_groups=2, **(plain | settings))
    with pytest.raises(WeightMapError, match=message):
        _check(config)


def test_experts_with_biases_are_grouped() -> None:
    from moe_replay.megatron.weights.gpt_oss import GPT_OSS

    assert settings_of("gpt_oss")["moe_grouped_gemm"]
    with pytest.raises(WeightMapError, match=r"no gradient.*expected moe_grouped_gemm True"):
        GPT_OSS.adapt_spec(None, SimpleNamespace(moe_grouped_gemm=False))


def test_a_family_of_the_caller_takes_precedence() -> None:
    own = weights.family_of("mixtral")
    path = "moe_replay.megatron.weights.families:MIXTRAL"
    assert weights.family_of("my_moe", own) is own
    assert weights.family_of("my_moe", path) is own
    assert weights.family_of("my_moe", "mixtral") is own
    with pytest.raises(WeightMapError, match=r"expected a Family, found function"):
        weights.family_of("my_moe", "moe_replay.megatron.weights.families:mixtral_settings")
    with pytest.raises(PluginError, match=r"weight family 'no_such_module:FAMILY' cannot be loaded"):
        weights.family_of("my_moe", "no_such_module:FAMILY")
