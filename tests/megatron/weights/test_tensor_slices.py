"""Rules: whatever the sizes, the shards of all ranks hold every element of the checkpoint's tensors once."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.megatron.weights.local_shards import (
    ParameterSpec,
    _partition_dim,
    global_name,
    specs_from_json,
    specs_to_json,
)
from moe_replay.megatron.weights.tensor_slices import (
    AlternatingGateUp,
    GatedQkv,
    GateUp,
    GroupedQkv,
    ParameterShard,
    Plain,
    Rule,
    Sections,
    Stacked,
    Transposed,
    WeightMapError,
)

EXPERTS = 3


def shards_of(
    shape: tuple[int, ...], dim: int | None, size: int, expert: int | None, config: object
) -> list[ParameterShard]:
    local = tuple(n // size if i == dim else n for i, n in enumerate(shape))
    ranks = range(1 if dim is None else size)
    return [ParameterShard("key", local, dim, 5, expert, config, rank, len(ranks)) for rank in ranks]


def filled(rule: Rule, shards: list[ParameterShard]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that numbered elements of the shards fill; each element must be written once."""
    tensors: dict[str, torch.Tensor] = {}
    number = 1
    for shard in shards:
        count = torch.Size(shard.shape).numel()
        content = torch.arange(number, number + count).view(shard.shape)
        number += count
        covered = torch.zeros(shard.shape, dtype=torch.bool)
        for part in rule.slices(shard):
            tensor = tensors.setdefault(part.name, torch.zeros(part.tensor_shape, dtype=torch.long))
            assert tuple(tensor.shape) == part.tensor_shape
            assert not covered[part.target].any()
            covered[part.target] = True
            region = part.oriented(tensor[part.source])
            assert not region.any(), "written twice"
            assert region.numel() == part.numel
            region.copy_(content[part.target].reshape(region.shape))
        assert covered.all()
    assert all(tensor.all() for tensor in tensors.values()), "an element is in no shard"
    return tensors


@given(
    groups=st.integers(1, 4),
    repeats=st.integers(1, 3),
    width=st.integers(1, 3).map(lambda n: 2 * n),
    size=st.sampled_from([1, 2, 4]),
    bias=st.booleans(),
)
def test_grouped_qkv_covers_every_row_once(groups: int, repeats: int, width: int, size: int, bias: bool) -> None:
    config = SimpleNamespace(num_query_groups=groups, num_attention_heads=groups * repeats, kv_channels=width)
    rows = groups * (repeats + 2) * width
    size = size if rows % size == 0 else 1
    shape = (rows,) if bias else (rows, 3)
    shards = shards_of(shape, 0, size, None, config)
    tensors = filled(GroupedQkv("{layer}.q", "{layer}.k", "{layer}.v"), shards)
    assert {name: len(tensor) for name, tensor in tensors.items()} == {
        "5.q": groups * repeats * width,
        "5.k": groups * width,
        "5.v": groups * width,
    }
    # Megatron-Core views the rows as (groups, repeats + 2, width).
    whole = torch.arange(1, torch.Size(shape).numel() + 1).view(groups, repeats + 2, width, *shape[1:])
    torch.testing.assert_close(tensors["5.q"], whole[:, :repeats].reshape(-1, *shape[1:]))
    torch.testing.assert_close(tensors["5.k"], whole[:, -2].reshape(-1, *shape[1:]))
    torch.testing.assert_close(tensors["5.v"], whole[:, -1].reshape(-1, *shape[1:]))


@given(groups=st.integers(1, 4), repeats=st.integers(1, 3), size=st.sampled_from([1, 2, 4]))
def test_gated_qkv_covers_every_row_once(groups: int, repeats: int, size: int) -> None:
    width, heads = 2, groups * repeats
    config = SimpleNamespace(num_query_groups=groups, num_attention_heads=heads, kv_channels=width)
    rows = groups * (2 * repeats + 2) * width
    size = size if rows % size == 0 else 1
    tensors = filled(GatedQkv("q", "k", "v"), shards_of((rows, 3), 0, size, None, config))
    # Megatron-Core views the rows as (groups, queries and gates and key and value, width), Transformers as
    # (heads, query and gate, width).
    whole = torch.arange(1, rows * 3 + 1).view(groups, 2 * repeats + 2, width, 3)
    gated = tensors["q"].view(groups, repeats, 2, width, 3)
    torch.testing.assert_close(gated[:, :, 0], whole[:, :repeats])
    torch.testing.assert_close(gated[:, :, 1], whole[:, repeats : 2 * repeats])
    torch.testing.assert_close(tensors["k"].view(groups, width, 3), whole[:, -2])
    torch.testing.assert_close(tensors["v"].view(groups, width, 3), whole[:, -1])


@given(size=st.sampled_from([1, 2, 4]))
def test_sections_are_each_cut(size: int) -> None:
    sizes = (4, 4, 8)
    shards = shards_of((16, 1, 3), 0, size, None, None)
    found = filled(Sections("conv", lambda config: sizes), shards)["conv"]
    numbered = torch.arange(1, 16 * 3 + 1).view(size, -1, 1, 3)
    local = [numbered[:, begin // size : (begin + length) // size] for begin, length in ((0, 4), (4, 4), (8, 8))]
    torch.testing.assert_close(found, torch.cat([part.flatten(0, 1) for part in local]))


@given(features=st.integers(1, 3).map(lambda n: 4 * n), size=st.sampled_from([1, 2, 4]))
def test_gate_and_up_are_each_cut(features: int, size: int) -> None:
    apart = filled(GateUp("gate", "up"), shards_of((2 * features, 3), 0, size, None, None))
    assert {name: tuple(tensor.shape) for name, tensor in apart.items()} == {"gate": (features, 3), "up": (features, 3)}
    together = filled(GateUp("both"), shards_of((2 * features, 3), 0, size, None, None))
    torch.testing.assert_close(together["both"], torch.cat([apart["gate"], apart["up"]]))


@given(size=st.sampled_from([1, 2, 4]), dim=st.sampled_from([None, 0, 1]))
def test_a_plain_parameter_is_put_together(size: int, dim: int | None) -> None:
    tensors = filled(Plain("{layer}.{expert}"), shards_of((8, 4), dim, size, 2, None))
    assert list(tensors) == ["5.2"]
    if dim == 0:
        torch.testing.assert_close(tensors["5.2"], torch.arange(1, 33).view(8, 4))


def test_stacked_experts_fill_one_tensor() -> None:
    config = SimpleNamespace(num_moe_experts=EXPERTS)
    shards = [shard for expert in range(EXPERTS) for shard in shards_of((8, 3), 0, 2, expert, config)]
    assert filled(Stacked(GateUp("all")), shards)["all"].shape == (EXPERTS, 8, 3)
    assert filled(Stacked(Plain("all")), shards)["all"].shape == (EXPERTS, 8, 3)


@given(features=st.integers(1, 3).map(lambda n: 4 * n), size=st.sampled_from([1, 2, 4]))
def test_gate_and_up_in_alternating_columns(features: int, size: int) -> None:
    apart = filled(GateUp("gate", "up"), shards_of((2 * features, 3), 0, size, None, None))
    found = filled(Transposed(AlternatingGateUp("both")), shards_of((2 * features, 3), 0, size, None, None))["both"]
    assert found.shape == (3, 2 * features)
    torch.testing.assert_close(found[:, ::2].T, apart["gate"])
    torch.testing.assert_close(found[:, 1::2].T, apart["up"])
    biases = filled(AlternatingGateUp("biases"), shards_of((2 * features,), 0, size, None, None))["biases"]
    assert biases.shape == (2 * features,)
    down = filled(Transposed(Plain("down")), shards_of((3, features), 1, size, None, None))["down"]
    torch.testing.assert_close(down.T, filled(Plain("down"), shards_of((3, features), 1, size, None, None))["down"])


def test_rows_that_the_config_does_not_promise() -> None:
    config = SimpleNamespace(num_query_groups=2, num_attention_heads=4, kv_channels=8)
    with pytest.raises(WeightMapError, match=r"key .*\[layer 5\]: expected 64, found 60, in 2 shards of 30"):
        GroupedQkv("q", "k", "v").slices(shards_of((60, 3), 0, 2, None, config)[0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.1.input_layernorm.weight", ("decoder.layers.{layer}.input_layernorm.weight", 6, None)),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
            ("decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight", 4, 3),
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight11",
            ("decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight", 4, 11),
        ),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            ("decoder.layers.{layer}.input_layernorm.weight", 4, None),
        ),
        (
            "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
            ("decoder.layers.{layer}.pre_mlp_layernorm.weight", 4, None),
        ),
        (
            "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
            ("decoder.layers.{layer}.self_attention.kv_layernorm.weight", 4, None),
        ),
        ("output_layer.weight", ("output_layer.weight", None, None)),
    ],
)
def test_names_of_the_whole_model(name: str, expected: tuple[str, int | None, int | None]) -> None:
    assert global_name(name, layer_numbers=[5, 7]) == expected


def test_slots_travel_between_ranks_unchanged() -> None:
    specs = (
        ParameterSpec("decoder.layers.{layer}.mlp.router.weight", 3, None, (8, 32), torch.float32, None),
        ParameterSpec(
            "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
            0,
            2,
            (6, 4),
            torch.bfloat16,
            0,
        ),
        ParameterSpec("output_layer.weight", None, None, (96, 32), torch.float16, 0),
    )
    for sent in (specs, ()):
        assert specs_from_json(json.loads(json.dumps(specs_to_json(sent)))) == sent


@pytest.mark.parametrize(
    ("kind", "parallel_mode", "weight", "bias"),
    [
        ("TEColumnParallelGroupedLinear", None, 0, 0),  # experts on several ranks
        ("TERowParallelGroupedLinear", None, 1, None),
        ("TERowParallelLinear", None, 1, None),
        ("TELinear", None, None, None),  # a replicated projection of multi-latent attention
        ("TERowParallelLinear", "row", 1, None),
        ("TEColumnParallelLinear", "column", 0, None),
    ],
)
def test_shards_that_transformer_engine_does_not_know_of(
    kind: str, parallel_mode: str | None, weight: int | None, bias: int | None
) -> None:
    """Transformer Engine marks every weight as sharded along 0 unless its mode is "row", and no bias without a mode."""
    layer = type(kind, (torch.nn.Linear,), {"parallel_mode": parallel_mode})(4, 4)
    layer.weight.tensor_model_parallel = True
    layer.weight.partition_dim = 1 if parallel_mode == "row" else 0
    assert (_partition_dim(layer.weight, layer), _partition_dim(layer.bias, layer)) == (weight, bias)
