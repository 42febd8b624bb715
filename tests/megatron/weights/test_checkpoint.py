"""Checkpoint folders: what is written can be read, and what is no checkpoint is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_replay.megatron.weights.checkpoint import INDEX, Checkpoint, CheckpointWriter
from moe_replay.megatron.weights.tensor_slices import WeightMapError
from tests.megatron.weights.models import assert_same_bytes, saved_tensors

pytest.importorskip("safetensors")

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5).to(torch.bfloat16),
    "c": torch.arange(8, dtype=torch.float16).view(2, 4),
}


def write(folder: Path, source: Path, file_bytes: int = 2**20) -> Path:
    source.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "merges.txt"):
        (source / name).write_text('{"model_type": "tiny"}')
    (source / INDEX).write_text("{}")
    (source / "pytorch_model.bin").write_text("not to be copied")
    writer = CheckpointWriter(folder, file_bytes)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    writer.finished(source)(folder)
    return folder


@pytest.mark.parametrize(("file_bytes", "count"), [(2**20, 1), (58, 2), (1, 3)])
def test_what_is_written_is_read(tmp_path: Path, file_bytes: int, count: int) -> None:
    folder = write(tmp_path / "out", tmp_path / "in", file_bytes)
    assert_same_bytes(saved_tensors(folder), TENSORS)
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted([*{"config.json", "tokenizer.json", "merges.txt"}, *weight_files(count)])
    checkpoint = Checkpoint(folder)
    assert checkpoint.model_type == "tiny"
    assert checkpoint.names == set(TENSORS)
    assert {name: checkpoint.shape(name) for name in TENSORS} == {n: tuple(t.shape) for n, t in TENSORS.items()}
    assert {name: checkpoint.dtype(name) for name in TENSORS} == {n: t.dtype for n, t in TENSORS.items()}
    torch.testing.assert_close(checkpoint.read("a", (slice(1, 3), slice(0, 2))), TENSORS["a"][1:3, :2])


def weight_files(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [INDEX, *(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))]


def test_weights_are_not_added_to_others(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", tmp_path / "in")
    with pytest.raises(WeightMapError, match=r"already contains weights.*model\.safetensors"):
        CheckpointWriter(folder)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(WeightMapError, match=r"not a checkpoint folder: expected config\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightMapError, match=r"expected model\.safetensors"):
        _ = Checkpoint(tmp_path).names


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = write(tmp_path / "out", tmp_path / "in", file_bytes=1)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["a"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightMapError, match=r"does not match the safetensors files.*ghost"):
        _ = Checkpoint(folder).names


def test_a_quantized_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(WeightMapError, match=r"quantized.*fp8.*bfloat16"):
        Checkpoint(tmp_path)


# ---- published in 8 bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 128), (130, 257), (5, 300), (128, 1)])
def test_weights_in_eight_bits_are_multiplied_with_the_scales_of_their_blocks(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    wanted = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            wanted[row, column] = values[row, column].float() * scales[row // 128, column // 128]
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fp8}))
    save_file({"a.weight": values, "a.weight_scale_inv": scales, "norm": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == {"a.weight", "norm"}
    assert (checkpoint.dtype("a.weight"), checkpoint.dtype("norm")) == (torch.bfloat16, torch.float32)
    rows, columns = shape
    for at in (
        (slice(0, rows), slice(0, columns)),
        (slice(rows // 3, rows), slice(0, columns // 2 + 1)),
        (slice(rows - 1, rows), slice(columns - 1, columns)),
    ):
        assert torch.equal(checkpoint.read("a.weight", at), wanted[at])
    assert torch.equal(checkpoint.whole("a.weight"), wanted.bfloat16())


@pytest.mark.parametrize("scales", [None, (1, 3)])
def test_scales_that_do_not_fit_are_named(tmp_path: Path, scales: tuple[int, int] | None) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": fp8}))
    tensors = {"a.weight": torch.ones(130, 300).to(torch.float8_e4m3fn)}
    tensors |= {} if scales is None else {"a.weight_scale_inv": torch.ones(scales)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightMapError, match=r"scales of a\.weight .*expected a\.weight_scale_inv of shape \(2, 3\)"):
        _ = Checkpoint(tmp_path).names
