"""Model folders read by shards: no rank loads the whole model, and weights in 8 bits are dequantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.distributed import folder_reading, harness
from tests.distributed.megatron_models import PRELOADED
from tests.megatron.weights.models import quantize_folder, save_checkpoint, tiny

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")
harness.PRELOADED.extend(PRELOADED)


@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_moe-tied"])
def test_each_rank_reads_the_rows_that_it_holds(tmp_path: Path, variant: str) -> None:
    model = tiny(variant)
    save_checkpoint(model, tmp_path, max_shard_size="100KB")
    ranks = harness.run_ranks(2, folder_reading.read_shards, str(tmp_path))
    wanted = dict([*model.named_parameters(), *model.named_buffers()])
    found = ranks[0]["state"]
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    sizes = [parameter.nbytes for parameter in model.parameters()]
    for one in ranks:
        assert one["held"] < 0.6 * sum(sizes)
        # every rank has whole buffers, and a norm that cannot be halved is read by one rank alone
        assert one["read"] <= one["held"] + sum(buffer.nbytes for buffer in model.buffers())
        assert one["peak"] <= one["held"] + 3 * max(sizes), "more than one parameter is held beside the shards"


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("fsdp", {}), ("megatron", {"tensor_parallel": 2}), ("megatron", {"expert_parallel": 2})],
    ids=["fsdp2", "tp2", "ep2"],
)
def test_a_folder_in_eight_bits_is_read_by_both_backends(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    if kind == "megatron":
        pytest.importorskip("megatron.core")
    model = tiny("deepseek_v3")
    save_checkpoint(model, tmp_path)
    meant = quantize_folder(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.offset_keys()}
    assert "F8_E4M3" in kinds.values()
    found = harness.run_ranks(2, folder_reading.exported, str(tmp_path), kind, settings)[0]
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        exact = tensor.bfloat16() if kind == "megatron" and kinds[name] == "F8_E4M3" else tensor
        assert torch.equal(found[name].float(), exact.float()), name
