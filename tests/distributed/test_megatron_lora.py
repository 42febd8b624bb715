"""LoRA on Megatron-Core in several layouts, against one process of FSDP2 with peft that trains the same adapters."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe_replay.train.backends.lora import LoraError
from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness, megatron_lora, megatron_training
from tests.distributed.megatron_models import PRELOADED
from tests.megatron.weights.models import DENSE_LAST, saved_tensors
from tests.train.runs import train_on_rank

pytest.importorskip("megatron.core")
pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("peft")
harness.PRELOADED.extend(PRELOADED)

TP, EP, PP = {"tensor_parallel": 2}, {"expert_parallel": 2}, {"pipeline_parallel": 2}
CP = {"context_parallel": 2}
PACKED, SHARDED = {"packed": True}, {"distributed_optimizer": True}
FULL = {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
GROUPED = {"moe_grouped_gemm": True}
ALL = ["all-linear", "router"]
LAYOUTS: dict[str, tuple[str, int, list[str], dict[str, Any]]] = {
    "1": ("qwen3_moe", 1, ALL, {}),
    "tp2-packed-recomputed": ("qwen3_moe", 2, ALL, TP | PACKED | FULL),
    "tp2-ep2-etp1-sharded": ("qwen3_moe", 2, ALL, TP | EP | SHARDED | {"expert_tensor_parallel": 1}),
    "pp2-vpp2-recomputed": ("qwen3_moe", 2, ALL, PP | FULL | {"virtual_pipeline": 2}),
    "pp2-router-alone": (DENSE_LAST, 2, ["router"], PP | {"virtual_pipeline": 2}),
    "cp2-packed": ("qwen3_moe", 2, ALL, CP | PACKED),
    "latent-attention-tp2": ("deepseek_v3", 2, ALL, TP),
    "grouped-tp2-recomputed": ("qwen3_moe", 2, ALL, TP | {"megatron": GROUPED | FULL["megatron"]}),
    "grouped-ep2-sharded": ("qwen3_moe", 2, ALL, EP | SHARDED | PACKED | {"megatron": GROUPED}),
    "attention-of-gpt-oss": ("gpt_oss", 1, ["q_proj", "o_proj", "router"], {}),
}
TOLERANCE = 2e-5


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="lora-")


@functools.cache
def policy(variant: str) -> tuple[str, bytes]:
    folder = Path(scratch().name, variant)
    return str(folder), megatron_training.save_policy(folder, variant)


@functools.cache
def adapter(variant: str, *targets: str) -> dict[str, torch.Tensor]:
    (made,) = harness.run_ranks(1, megatron_lora.start, policy(variant)[0], list(targets))
    return made


@functools.cache
def expected(variant: str, *targets: str) -> dict[str, Any]:
    given = (*policy(variant), "fsdp", list(targets), adapter(variant, *targets), {})
    (outcome,) = harness.run_ranks(1, megatron_lora.two_updates, *given)
    return outcome


def close(found: Any, wanted: Any) -> bool:
    return torch.allclose(torch.as_tensor(found), torch.as_tensor(wanted), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    with_whole_runs(
        with_thorough(LAYOUTS, {"1", "pp2-vpp2-recomputed"}),
        {"tp2-packed-recomputed", "pp2-router-alone", "cp2-packed", "latent-attention-tp2", "grouped-ep2-sharded"},
    ),
)
def test_updates_as_fsdp_and_peft_make_them(name: str) -> None:
    variant, size, targets, settings = LAYOUTS[name]
    begin, one = adapter(variant, *targets), expected(variant, *targets)
    given = (*policy(variant), "megatron", targets, begin, settings)
    ranks = harness.run_ranks(size, megatron_lora.two_updates, *given)
    assert close([sum(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)], one["losses"])
    assert all(close(rank["norms"], one["norms"]) for rank in ranks)
    assert all(close(rank["native"][row], one["native"][row]) for rank in ranks for row in rank["native"])
    assert close(sum(rank["reference"] for rank in ranks), one["reference"])
    first = ranks[0]
    assert first["adapter"].keys() == one["adapter"].keys() == begin.keys()
    for tensor_name, before in begin.items():
        moved = (one["adapter"][tensor_name] - before).norm()
        assert moved > 0, tensor_name
        assert (first["adapter"][tensor_name] - one["adapter"][tensor_name]).norm() < 1e-4 * moved, tensor_name
    base = saved_tensors(policy(variant)[0])
    assert first["weights"].keys() == base.keys()
    for tensor_name, tensor in one["weights"].items():
        torch.testing.assert_close(first["weights"][tensor_name], tensor, rtol=1e-4, atol=1e-5)
        is_adapted = any(tensor_name.removesuffix(".weight") in adapted for adapted in begin)
        assert is_adapted != torch.equal(first["weights"][tensor_name], base[tensor_name]), tensor_name


@pytest.mark.whole_runs
def test_a_saved_adapter_goes_on_bit_for_bit(tmp_path: Path) -> None:
    given = (*policy("qwen3_moe"), ALL, adapter("qwen3_moe", *ALL), TP | SHARDED | PACKED, str(tmp_path))
    assert harness.run_ranks(2, megatron_lora.stop_and_go_on, *given) == [[], []]
    saved = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert any(".lora." in name for name in saved)
    assert all(".lora." in name or name.startswith("optimizer.") for name in saved), "frozen weights are saved"


@pytest.mark.whole_runs
@pytest.mark.parametrize("resumed", [PP, TP | {"megatron": GROUPED}], ids=["pp2", "grouped"])
def test_a_saved_adapter_goes_on_in_another_layout(resumed: dict[str, Any], tmp_path: Path) -> None:
    given = (*policy("qwen3_moe"), ALL, adapter("qwen3_moe", *ALL), TP | SHARDED, str(tmp_path), resumed)
    assert harness.run_ranks(2, megatron_lora.stop_and_go_on, *given) == [[], []]


def test_a_saved_adapter_of_grouped_experts_goes_on_in_another_layout(tmp_path: Path) -> None:
    grouped = EP | SHARDED | {"megatron": GROUPED}
    given = (*policy("qwen3_moe"), ALL, adapter("qwen3_moe", *ALL), grouped, str(tmp_path), TP)
    assert harness.run_ranks(2, megatron_lora.stop_and_go_on, *given) == [[], []]


def test_adapters_start_alike_in_every_layout() -> None:
    folder = policy("qwen3_moe")[0]
    whole, *_ = harness.run_ranks(1, megatron_lora.initial, folder, ALL, {})
    for layout in (TP | EP | {"expert_tensor_parallel": 1}, TP | {"megatron": GROUPED}):
        sharded, *_ = harness.run_ranks(2, megatron_lora.initial, folder, ALL, layout)
        assert whole.keys() == sharded.keys()
        assert all(torch.equal(whole[name], sharded[name]) for name in whole)
    assert all(tensor.any() == (".lora_A." in name) for name, tensor in whole.items())


def test_training_with_r3_and_gspo_exports_what_peft_loads(demo_files: Any, tmp_path: Path) -> None:
    overrides = {
        "backend": {"kind": "megatron", **TP},
        "model": {"lora_rank": 4, "lora_target_modules": ALL},
        "algorithm": {"importance_sampling_level": "sequence", "updates_per_rollout": 1, "beta": 0.1},
        "checkpoint": {"export": True},
        "steps": 2,
    }
    arguments = (str(demo_files.model), str(demo_files.train), str(tmp_path / "run"), overrides)
    lines, _ = harness.run_ranks(2, train_on_rank, *arguments)
    assert all(line["routing/aligned"] != 0 and line["loss/grad_norm"] > 0 for line in lines)
    assert lines[0]["loss/reference_kl"] == pytest.approx(0, abs=1e-6)
    assert lines[1]["loss/reference_kl"] > 1e-7
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    exported = tmp_path / "run/checkpoints/step-00000002"
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (demo_files.model, exported / "hf"))
    adapted = PeftModel.from_pretrained(base, str(exported / "adapter"))
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        found, wanted = adapted(input_ids=ids).logits, merged(input_ids=ids).logits
        with adapted.disable_adapter():
            assert (adapted(input_ids=ids).logits - wanted).abs().max() > 1e-4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_targets_that_megatron_lacks_are_refused_at_once(tmp_path: Path) -> None:
    from moe_replay.megatron import cpu as megatron_cpu
    from moe_replay.train.backends import megatron_build

    with megatron_cpu.enabled(), pytest.raises(LoraError, match="no layer of this model has this name"):
        config = megatron_lora.lora_config(policy("qwen3_moe")[0], "megatron", ["qkv_proj"])
        megatron_build.recipe_for(config, policy("qwen3_moe")[0])
