"""Frozen weights in 8 bits: the numbers of a model whose weights were rounded, in half the memory."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.policy import all_weights

pytest.importorskip("peft")
pytest.importorskip("transformers", "5")

from moe_replay.errors import LayoutError
from moe_replay.train.backends import compilation
from moe_replay.train.backends.fp8_base import names_in_8_bits, round_weights
from moe_replay.train.backends.fp8_weights import CODES, dequantise, quantise
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.backends.lora import plain_name
from moe_replay.train.backends.offload import local_part
from moe_replay.train.checkpoint.checkpoint import CheckpointError
from moe_replay.train.config.file import to_toml
from moe_replay.train.config.one_copy import check_alone, two_copies_because
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.loop import train
from moe_replay.weights.model_folder import ModelError
from tests.faults.forked import fork_command
from tests.faults.processes import wait_for_line
from tests.models import random_ids, tiny_qwen3_moe
from tests.replay.adapters.families import tiny_model
from tests.train.runs import tiny_config
from tests.train.test_shared_base import backend, config_of, logits_and_gradients

FP8 = {"model": {"base_dtype": "fp8"}}

# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 384), (3, 256, 128), (192, 96), (576, 64), (4, 24, 40)], ids=str)
def test_weights_have_the_same_value_in_every_dtype(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[..., :8, :8] *= 50  # blocks of other sizes
    codes, scales = quantise(weight)
    assert codes.dtype == CODES
    assert codes.shape == weight.shape
    assert torch.equal(scales, torch.exp2(scales.log2().round())), "powers of two"
    found = dequantise(codes, scales, torch.float32)
    assert torch.equal(dequantise(codes, scales, torch.bfloat16).float(), found)
    assert ((found - weight).abs() <= weight.abs() / 16 + scales.max() * 2**-10).all(), "four bits of precision"
    again = dequantise(*quantise(found), torch.float32)
    assert torch.equal(again, found)


def test_blocks_of_zeros_and_of_large_weights() -> None:
    weight = torch.zeros(128, 384)
    weight[:, 128:256] = 1e30
    weight[:, 256:] = 1e-38
    found = dequantise(*quantise(weight), torch.float32)
    assert torch.isfinite(found).all()
    assert not found[:, :128].any()
    assert torch.allclose(found[:, 128:256], weight[:, 128:256], rtol=1 / 16)


# ---- a policy --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Models, and the same with weights that have been rounded."""
    models = {"qwen3_moe": tiny_qwen3_moe(num_hidden_layers=2), "gpt_oss": tiny_model("gpt_oss", vocab_size=97)}
    models["tied"] = tiny_qwen3_moe(num_hidden_layers=2, tie_word_embeddings=True)
    made = {}
    for name, model in models.items():
        made[name] = tmp_path_factory.mktemp(name), tmp_path_factory.mktemp(f"{name}-rounded")
        model.save_pretrained(made[name][0])
        before = {one: parameter.clone() for one, parameter in model.named_parameters()}
        round_weights(model)
        rounded = {one for one, parameter in model.named_parameters() if not torch.equal(parameter, before[one])}
        assert rounded == names_in_8_bits(model)
        assert not any(part in one for one in rounded for part in ("embed", "norm", "lm_head", "gate.", "router"))
        model.save_pretrained(made[name][1])
    return made


@pytest.mark.parametrize("recomputed", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "tied"])
def test_a_policy_computes_as_one_with_rounded_weights(
    family: str, recomputed: bool, folders: dict[str, tuple[Path, Path]], group: None
) -> None:
    model = {"gradient_checkpointing": recomputed}
    folder, rounded = folders[family]
    plain = backend(rounded, model=model)
    expected, sent = logits_and_gradients(plain), dict(all_weights(plain))
    policy = backend(folder, model=model | FP8["model"])
    in_8_bits = {plain_name(name) for name, one in policy.model.named_parameters() if one.dtype == CODES}
    assert any(".experts." in name for name in in_8_bits)
    assert any("q_proj" in name for name in in_8_bits)
    found = logits_and_gradients(policy)
    assert found.keys() == expected.keys()
    assert len([name for name in found if ".experts." in name]) > 2
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    merged = dict(all_weights(policy))
    assert merged.keys() == sent.keys()
    assert all(torch.equal(merged[name], values) for name, values in sent.items())
    assert [info.dtype for info in policy.weight_source().metadata()] == [one.dtype for one in merged.values()]
    policy.close()
    plain.close()


class Saved:
    """What autograd keeps for a backward, by storage."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor


def kept(policy: FsdpBackend) -> int:
    """How many dequantised weights autograd keeps for the backward."""
    policy.model.train()
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        policy.model(input_ids=random_ids(2, 12)).logits.sum().backward()
    policy._optimizer.zero_grad()
    found = {one.untyped_storage().data_ptr(): one for one in saved.tensors if one.dtype != CODES}
    weights = {name: p for name, p in policy.model.named_parameters() if p.dtype == CODES}
    plain = [dequantise(p, policy.model.get_buffer(f"{name}_scales"), torch.float32) for name, p in weights.items()]
    assert any(one.dtype == CODES for one in saved.tensors)
    as_sets = [weight.flatten().sort().values for weight in plain]
    sizes = {len(one) for one in as_sets}
    candidates = [one.detach().flatten().sort().values for one in found.values() if one.numel() in sizes]
    return sum(any(torch.equal(one, weight) for weight in as_sets) for one in candidates if one.is_floating_point())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["eager", "compiled"])
def test_autograd_keeps_no_dequantised_weight(
    compiled: bool, folders: dict[str, tuple[Path, Path]], group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What inductor keeps for the backward, without its compilation.
    monkeypatch.setattr(compilation, "COMPILER", "aot_eager_decomp_partition")
    folder, rounded = folders["qwen3_moe"]
    model = {"compile": compiled, "attn_implementation": "sdpa"}
    policy = backend(folder, model=model | FP8["model"])
    assert policy.is_compiled is compiled
    assert kept(policy) == 0
    found = logits_and_gradients(policy)
    policy.close()
    plain = backend(rounded, model=model | {"compile": False})
    for name, value in logits_and_gradients(plain).items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)
    plain.close()


def test_weights_take_a_byte_each(folders: dict[str, tuple[Path, Path]], group: None) -> None:
    folder, _ = folders["qwen3_moe"]
    policy = backend(folder, model=FP8["model"])
    parameters = [parameter for parameter in policy.model.parameters() if not parameter.requires_grad]
    sizes = {name: one.numel() for name, one in tiny_qwen3_moe(num_hidden_layers=2).named_parameters()}
    names = names_in_8_bits(tiny_qwen3_moe(num_hidden_layers=2))
    expected = sum(size * (1 if name in names else 4) for name, size in sizes.items())
    assert sum(parameter.nbytes for parameter in parameters) == expected
    assert policy.state_bytes() == 12 * sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    policy.close()


def test_offload_moves_weights_in_8_bits(folders: dict[str, tuple[Path, Path]], group: None) -> None:
    folder, _ = folders["qwen3_moe"]
    plain, moved = (backend(folder, model=FP8["model"], backend={"offload": offload}) for offload in (False, True))
    moved.offload()
    assert not any(local_part(parameter).untyped_storage().nbytes() for parameter in moved.model.parameters())
    moved.reload()
    found, expected = logits_and_gradients(moved), logits_and_gradients(plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for policy in (plain, moved):
        policy.close()


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, group: None) -> None:
    model = tiny_qwen3_moe(num_hidden_layers=2)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.down_proj")[0, 0, 0] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not finite"):
        backend(tmp_path, model=FP8["model"])


def test_several_ranks_are_refused(folders: dict[str, tuple[Path, Path]]) -> None:
    check_alone("fp8", 1)
    with pytest.raises(LayoutError, match=r"is for one rank.*found 2"):
        check_alone("fp8", 2)


def test_there_is_no_one_copy_of_weights_in_8_bits(folders: dict[str, tuple[Path, Path]]) -> None:
    rollout = {"engine": "vllm", "lora": True, "share_weights": True}
    config = config_of(folders["qwen3_moe"][0], rollout=rollout, **FP8)
    assert two_copies_because(config, 1, "cpu") == "model.base_dtype = 'fp8': the trainer's are in 8 bits"


# ---- a run -----------------------------------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "model": {"base_dtype": "fp8", "lora_rank": 4, "lora_target_modules": ["all-linear"]},
    "checkpoint": {"export": True, "every": 1},
}


@pytest.mark.slow
def test_a_run_with_r3_is_killed_and_resumed(demo_files: Any, tmp_path: Path, metrics_of: Any) -> None:
    """By SIGKILL, in the middle of whatever it does after its second step."""

    def config(name: str, **overrides: Any) -> TrainConfig:
        return tiny_config(demo_files.model, demo_files.train, tmp_path / name, **RUN | overrides)

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(config("killed", steps=1000)))
    with fork_command("train", str(recipe)) as run:
        wait_for_line(run.stdout, "step 2/1000")
        run.kill()
    assert run.returncode == -signal.SIGKILL
    steps = len(metrics_of(tmp_path / "killed")) + 1  # how far it came by then is up to the machine
    with pytest.raises(CheckpointError, match=r"other settings: expected model.base_dtype None, found .* fp8"):
        train(config("killed", steps=steps, model={**RUN["model"], "base_dtype": None}))
    killed, whole = (train(config(name, steps=steps)) for name in ("killed", "whole"))
    lines = metrics_of(whole)
    assert metrics_of(killed) == lines
    assert all(line["routing/aligned"] != 0 and line["loss/grad_norm"] > 0 for line in lines)
    assert all(line["mismatch/rollout_vs_old/k3_kl"] < 1e-9 for line in lines), "the engine has the trainer's values"
    of_killed, of_whole = (folder / f"checkpoints/step-{steps:08d}" for folder in (killed, whole))
    for file in ("policy/rank-00000.safetensors", "hf/model.safetensors", "adapter/adapter_model.safetensors"):
        expected, found = load_file(of_whole / file), load_file(of_killed / file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), file
    assert all("lora_" in name for name in load_file(of_whole / "policy/rank-00000.safetensors"))
    check_export(of_whole, demo_files.model)


def check_export(checkpoint: Path, folder: Path) -> None:
    """The merged weights are those of the rounded model with the exported adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    original = {name: one.clone() for name, one in model.state_dict().items()}
    round_weights(model)
    rounded = {name: one.clone() for name, one in model.state_dict().items()}
    merged = PeftModel.from_pretrained(model, str(checkpoint / "adapter")).merge_and_unload().state_dict()
    exported = AutoModelForCausalLM.from_pretrained(checkpoint / "hf").state_dict()
    assert exported.keys() == merged.keys()
    in_8_bits = names_in_8_bits(AutoModelForCausalLM.from_pretrained(folder))
    assert any(".experts." in name for name in in_8_bits)
    for name, values in exported.items():
        torch.testing.assert_close(values, merged[name], rtol=1e-5, atol=1e-7)
        assert torch.equal(values, original[name]) is (name not in in_8_bits), name
        assert torch.equal(values, rounded[name]) is (name not in in_8_bits), name
