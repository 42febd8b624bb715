"""Whole runs on several processes: the curve is that of one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness, megatron_models
from tests.train.runs import train_on_rank

pytest.importorskip("transformers")
harness.PRELOADED.extend(megatron_models.PRELOADED)

COMPARED = (
    "reward/mean",
    "loss/total",
    "loss/grad_norm",
    "loss/entropy",
    "mismatch/old_vs_train/k3_kl",
    "routing/agreement",
)


CHUNKS = {"pipeline_parallel": 2, "virtual_pipeline": 2}
DEEPSEEK = {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 1024,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}


def curve(size: int, files: Any, output: Path, **overrides: Any) -> list[dict[str, float]]:
    arguments = (str(files.model), str(files.train), str(output), overrides)
    every = harness.run_ranks(size, train_on_rank, *arguments)
    assert all(lines == every[0] for lines in every)
    return [{name: line[name] for name in COMPARED} for line in every[0]]


@pytest.mark.parametrize(
    ("backend", "mode"),
    with_whole_runs(
        with_thorough([("fsdp", "r2"), ("fsdp", "r3"), ("megatron", "r3")], [("fsdp", "r3")]), [("megatron", "r3")]
    ),
)
def test_one_two_and_four_processes_give_the_same_curve(
    demo_files: Any,
    tmp_path: Path,
    backend: str,
    mode: str,
) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    # Steps so small, and so little of Adam's scaling, that rounding does not grow: what differs in the last digit of a
    # weight must not be another number for the engine in bfloat16, which then would sample other tokens.
    optimiser = {"lr": 1e-4, "eps": 1e-3}
    overrides = {
        **{"backend": {"kind": backend}, "replay": {"mode": mode}},
        **{"rollout": {"dtype": "bfloat16"}, "optim": optimiser, "steps": 2},
    }
    curves = {size: curve(size, demo_files, tmp_path / str(size), **overrides) for size in (1, 2, 4)}
    for size in (2, 4):
        for one, several in zip(curves[1], curves[size], strict=True):
            assert several == pytest.approx(one, rel=2e-4, abs=1e-7), f"{size} processes"


@pytest.mark.whole_runs
def test_a_run_resumed_on_half_the_ranks_is_the_one_that_was_never_stopped(demo_files: Any, tmp_path: Path) -> None:
    overrides = {"rollout": {"dtype": "bfloat16"}, "optim": {"lr": 1e-4, "eps": 1e-3}}
    whole = curve(4, demo_files, tmp_path / "whole", steps=2, **overrides)
    curve(4, demo_files, tmp_path / "half", steps=1, **overrides)
    resumed = curve(2, demo_files, tmp_path / "half", steps=2, **overrides)
    assert resumed[0] == whole[0]
    assert resumed[1] == pytest.approx(whole[1], rel=2e-4, abs=1e-7)


def save_model(folder: Path, like: Path, dense_layers: tuple[int, ...]) -> Path:
    """A model of four layers with random weights, some of them dense, and the tokenizer of another one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(like, folder)
    config = AutoConfig.from_pretrained(like)
    config.update({"num_hidden_layers": 4, "mlp_only_layers": list(dense_layers), "layer_types": None})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def save_deepseek(folder: Path, like: Path) -> Path:
    """A DeepSeek-V3 of four layers with random weights, the first three of them dense, as in the published model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(like, folder)
    given = AutoConfig.from_pretrained(like)
    sizes = {name: getattr(given, name) for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model("deepseek_v3", **DEEPSEEK, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("mode", "dense"),
    # a whole run whose last chunk has no router: tests/distributed/test_trajectory_store.py
    with_whole_runs(
        with_thorough(
            [("off", None), ("r2", None), ("r3", None), ("off", (3,)), ("r2", (0, 3)), ("r3", (3,))],
            [("off", (3,)), ("r2", (0, 3)), ("r3", (3,))],
        ),
        [("off", None), ("r2", None)],
    ),
)
def test_pipeline_chunks_without_routers_change_nothing(
    demo_files: Any,
    tmp_path: Path,
    mode: str,
    dense: tuple[int, ...] | None,
) -> None:
    """Each of the four chunks has one layer; those of dense layers have no router.

    dense   layers of a Qwen3-MoE; None: a DeepSeek-V3, whose first three are
    """
    pytest.importorskip("megatron.core")
    folder = tmp_path / "model"
    model = save_model(folder, demo_files.model, dense) if dense else save_deepseek(folder, demo_files.model)
    files = replace(demo_files, model=model)
    optim = {"lr": 1e-2, "eps": 1e-2}  # a small eps would amplify rounding where gradients are tiny
    overrides = {"replay": {"mode": mode}, "rollout": {"dtype": "bfloat16"}, "optim": optim, "steps": 2}
    one = curve(1, files, tmp_path / "one", backend={"kind": "megatron"}, **overrides)
    chunks = curve(2, files, tmp_path / "chunks", backend={"kind": "megatron", **CHUNKS}, **overrides)
    for expected, found in zip(one, chunks, strict=True):
        # A weight that differs in its last digit may be another number for the engine in bfloat16: a route may differ.
        agreements = [values.pop("routing/agreement") for values in (found, expected)]
        assert agreements[0] == pytest.approx(agreements[1], abs=0.01)
        assert found == pytest.approx(expected, rel=2e-3, abs=1e-6)
