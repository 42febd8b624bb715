"""Weights of sharded policies for engines: the bytes of the checkpoint, on the ranks that need them and no others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.combinations import with_whole_runs
from tests.distributed import harness, weight_sources
from tests.distributed.megatron_models import PRELOADED
from tests.megatron.weights.models import assert_same_bytes, save_checkpoint, saved_tensors, tiny

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")
harness.PRELOADED.extend(PRELOADED)

BF16 = {"dtype": "bfloat16"}
EP2 = {"expert_parallel": 2}
PP_EP = {"pipeline_parallel": 2, "expert_parallel": 2}
RECEIVERS = [[0], [1, 3], [0, 1, 2, 3]]


def as_sent(folder: Path, kind: str) -> dict[str, Tensor]:
    """What a bfloat16 policy makes of a float32 checkpoint: rounded, except the correction bias of the routers."""
    kept = "e_score_correction_bias"
    exact = saved_tensors(folder)
    rounded = {name: tensor if kept in name else tensor.bfloat16() for name, tensor in exact.items()}
    return rounded if kind == "fsdp" else {name: tensor.float() for name, tensor in rounded.items()}


@pytest.mark.parametrize(
    ("variant", "kind", "settings"),
    with_whole_runs(
        [
            *(("deepseek_v3", "fsdp", {}), ("deepseek_v3", "fsdp", {"expert_parallel": 2})),
            *(("deepseek_v3", "megatron", PP_EP), ("qwen3_moe-tied", "megatron", PP_EP)),
        ],
        [("deepseek_v3", "megatron", PP_EP)],
    ),
    ids=["fsdp4", "fsdp2-ep2", "pp2-ep2", "pp2-ep2-tied"],
)
def test_receivers_get_the_bytes_of_the_checkpoint_layer_by_layer(
    tmp_path: Path, variant: str, kind: str, settings: dict[str, Any]
) -> None:
    save_checkpoint(tiny(variant), tmp_path)
    ranks = harness.run_ranks(4, weight_sources.read_source, str(tmp_path), kind, settings | BF16, RECEIVERS)
    wanted = as_sent(tmp_path, kind)
    total = sum(tensor.nbytes for tensor in wanted.values())
    # One parameter beside the layer: the shards that a tensor is assembled from, or experts that are still fused.
    scratch = max(tensor.nbytes for tensor in tiny(variant).state_dict().values()) // (2 if kind == "fsdp" else 1)
    for number, receivers in enumerate(RECEIVERS):
        found = [rank[number] for rank in ranks]
        assert all(one["metadata"] == found[0]["metadata"] for one in found)
        assert len({len(one["names"]) for one in found}) == 1, "as many groups on every rank"
        for rank, one in enumerate(found):
            if rank not in receivers:
                assert not any(one["names"])
                assert one["received"] == 0
                continue
            assert_same_bytes(one["tensors"], wanted)
            flat = [name for names in one["names"] for name in names]
            assert one["metadata"] == [(name, str(wanted[name].dtype), list(wanted[name].shape)) for name in flat]
            assert_one_layer_each(one["names"], settings.get("expert_parallel", 1) if kind == "fsdp" else 1)
            assert one["peak"] <= one["largest"] + scratch, "more than one layer is alive"
            assert one["largest"] < total / 3
        if len(receivers) < 4:
            assert all(one["collectives"] == 0 for one in found)
            assert sum(one["sent"] for one in found) == sum(one["received"] for one in found)
            assert 0 < sum(one["received"] for one in found) < len(receivers) * total


def assert_one_layer_each(groups: list[list[str]], expert_ranks: int) -> None:
    """A layer is one group; the experts of each rank are another one, where ranks have some of them."""
    divided = 3 * expert_ranks * (expert_ranks > 1)
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in groups]
    assert [len(of_group) for of_group in layers if of_group] == [1] * (4 + divided)
    assert len(groups) == 6 + divided, "embedding, four layers, head"
    if divided:
        experts = [[name for name in names if ".mlp.experts." in name] for names in groups]
        assert sorted(map(len, filter(None, experts))) == [8 // expert_ranks * 3] * divided


@pytest.mark.parametrize(("kind", "settings"), [("fsdp", {}), ("megatron", {"tensor_parallel": 2})])
def test_adapters_are_merged_into_what_one_rank_receives(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    save_checkpoint(tiny("qwen3_moe"), tmp_path)
    ranks = harness.run_ranks(2, weight_sources.read_merged, str(tmp_path), kind, settings, [[0], [0, 1]])
    alone, together = (ranks[0][number]["tensors"] for number in (0, 1))
    assert_same_bytes(alone, together)
    assert_same_bytes(ranks[1][1]["tensors"], together)
    base = saved_tensors(tmp_path)
    moved = {name.split(".")[-2] for name, tensor in alone.items() if not torch.equal(tensor, base[name])}
    assert moved == {"q_proj", "gate_proj", "up_proj", "down_proj"}


def test_owners_merge_the_adapters_of_their_experts(tmp_path: Path) -> None:
    save_checkpoint(tiny("qwen3_moe"), tmp_path)
    ranks = harness.run_ranks(2, weight_sources.read_owned, str(tmp_path), EP2)
    first, second = (owned for _, owned in ranks)
    assert not first.keys() & second.keys()
    assert second
    assert all(".experts." in name for name in second)
    assert_same_bytes(first | second, ranks[0][0])
    base = saved_tensors(tmp_path)
    assert all(torch.equal(second[name], base[name]) == ("down_proj" not in name) for name in second)


@pytest.mark.parametrize(
    ("kind", "settings"),
    with_whole_runs([("fsdp", {}), ("fsdp", EP2), ("megatron", PP_EP)], [("fsdp", {})]),
    ids=["fsdp4", "fsdp2-ep2", "pp2-ep2"],
)
def test_an_export_is_shared_by_the_ranks(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny("deepseek_v3")
    save_checkpoint(model, tmp_path / "model")
    out = tmp_path / "out"
    ranks = harness.run_ranks(4, weight_sources.export, str(tmp_path / "model"), kind, settings | BF16, str(out))
    wanted = as_sent(tmp_path / "model", kind)
    assert_same_bytes(saved_tensors(out), wanted)
    total = sum(tensor.nbytes for tensor in wanted.values())
    layer = max(sum(t.nbytes for name, t in wanted.items() if f".layers.{n}." in name) for n in range(4))
    scratch = max(tensor.nbytes for tensor in model.state_dict().values())
    for one in ranks:
        share = sum(one["sizes"].values())
        assert 0 < share < 0.6 * total
        assert one["peak"] <= share + layer + scratch
    every = [name for one in ranks for name in one["wrote"]]
    assert len(every) == len(set(every)) == len(list(out.iterdir())), "each file is written by one rank"
    assert "config.json" in ranks[0]["wrote"]
    if settings == EP2:
        for number, one in enumerate(ranks):
            files = [load_file(out / name) for name in one["sizes"]]
            experts = {
                int(found[1]) for file in files for name in file if (found := re.search(r"experts\.(\d+)\.", name))
            }
            assert experts == {2 * (2 * (number % 2) + number // 2) + own for own in (0, 1)}, "those that it holds"
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert all(torch.isfinite(tensor).all() for tensor in loaded.state_dict().values())
