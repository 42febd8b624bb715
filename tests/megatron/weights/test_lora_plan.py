"""Which parameters of Megatron-Core get an adapter: by the rules of a family alone, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_replay.megatron.lora import LoraPlan
from moe_replay.megatron.weights import family_of
from moe_replay.megatron.weights.loading import WeightMap
from moe_replay.megatron.weights.tensor_slices import ParameterShard, WeightMapError

CONFIG = SimpleNamespace(num_moe_experts=4, num_query_groups=2, num_attention_heads=4, kv_channels=8, hidden_size=16)
LAYER = "decoder.layers.{layer}."
QKV = ParameterShard(LAYER + "self_attention.linear_qkv.weight", (64, 16), 0, 3, None, CONFIG)
ROUTER = ParameterShard(LAYER + "mlp.router.weight", (4, 16), None, 3, None, CONFIG)
FC1 = ParameterShard(LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight", (24, 16), 0, 3, 1, CONFIG)
NORM = ParameterShard(LAYER + "input_layernorm.weight", (16,), None, 3, None, CONFIG)


def plan(family: str, *targets: str) -> LoraPlan:
    found = family_of(family)
    return LoraPlan(4, 8.0, targets, WeightMap(found, family, found.rules_for(fused=False, tied=False)))


def model(*shards: ParameterShard) -> Any:
    return SimpleNamespace(unsharded=lambda: iter(shards))


def test_parts_of_a_parameter_are_weights_of_the_checkpoint() -> None:
    made = plan("qwen3_moe", "q_proj", "v_proj", "gate_proj", "up_proj")
    names = [(part.name.split(".")[-2], part.group, len(part.rows)) for part in made.parts(QKV)]
    assert names == [("q_proj", 0, 32), ("v_proj", 1, 16)]
    assert [(part.name.split(".")[-2], part.group) for part in made.parts(FC1)] == [("gate_proj", 0), ("up_proj", 0)]
    assert not made.parts(ROUTER)
    assert not made.parts(NORM)


def test_all_linear_leaves_routers_out() -> None:
    assert plan("qwen3_moe", "all-linear").parts(QKV)
    assert not plan("qwen3_moe", "all-linear").parts(ROUTER)
    assert plan("qwen3_moe", "router").parts(ROUTER)
    assert plan("qwen3_moe", "gate").parts(ROUTER)


def test_a_name_that_no_layer_has_is_refused() -> None:
    with pytest.raises(WeightMapError, match=r"no layer of this model.*q_proj, router, v_proj.*'lm_head'"):
        plan("qwen3_moe", "q_proj", "lm_head").check(model(QKV, ROUTER))
    plan("qwen3_moe", "q_proj", "router").check(model(QKV, ROUTER))


def test_experts_that_a_checkpoint_keeps_in_one_tensor_are_refused() -> None:
    with pytest.raises(WeightMapError, match=r"no separate matrix.*layer 3.*experts\.gate_up_proj"):
        plan("gpt_oss", "all-linear").check(model(FC1))
    plan("gpt_oss", "q_proj").check(model(QKV, FC1))
