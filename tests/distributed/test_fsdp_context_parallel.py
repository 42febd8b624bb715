"""Context parallel in the FSDP2 backend: the updates are those of one process.

The trajectories' routes are those of a model with other routers, so that natively most tokens would go elsewhere.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.combinations import with_thorough
from tests.distributed import context_parallel, harness, megatron_training
from tests.distributed.test_training import COMPARED
from tests.train.runs import train_on_rank

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic")

RECOMPUTED = {"model.gradient_checkpointing": True}
LORA = {"model.lora_rank": 4, "model.lora_target_modules": ("q_proj", "v_proj", "down_proj", "router")}
MODES = ("off", "r2", "r3")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("off", {}),
    "r2, recomputed": ("r2", RECOMPUTED),
    "r3, recomputed": ("r3", RECOMPUTED),
    "r3, LoRA": ("r3", LORA),
}


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="context-parallel-")


@functools.cache
def policy(variant: str) -> tuple[str, bytes]:
    """The folder of a model of four heads, and trajectories."""
    folder = Path(scratch().name, variant)
    return str(folder), megatron_training.save_policy(folder, variant)


def check_updates(
    size: int, context: int, cases: dict[str, tuple[str, dict[str, Any]]], variant: str = "qwen3_moe"
) -> None:
    """Compare the updates on ranks of which `context` share sequences with those of one process."""
    (alone,) = harness.run_ranks(1, context_parallel.updates_of, *policy(variant), cases)
    ranks = harness.run_ranks(size, context_parallel.updates_of, *policy(variant), in_groups(context, cases))
    for name in cases:
        check_same([rank[name] for rank in ranks], alone[name], name)


def in_groups(context: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Cases in which `context` ranks share sequences."""
    return {name: (mode, settings | {"backend.context_parallel": context}) for name, (mode, settings) in cases.items()}


def check_same(ranks: list[dict[str, Any]], alone: dict[str, Any], name: str) -> None:
    losses = [sum(of_update) for of_update in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(alone["losses"], rel=1e-6, abs=1e-6), name
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5), name
    for kind in ("scores", "references"):
        rows = {row: values for rank in ranks for row, values in rank[kind].items()}
        assert sum(len(rank[kind]) for rank in ranks) == len(rows), "a sequence is reported twice"
        assert rows.keys() == alone[kind].keys()
        assert all(torch.allclose(rows[row], alone[kind][row], rtol=1e-5, atol=1e-5) for row in rows), name
    assert len(ranks[0]["gradients"]) == len(alone["gradients"]) == megatron_training.UPDATES
    for found, wanted in zip(ranks[0]["gradients"], alone["gradients"], strict=True):
        assert found.keys() == wanted.keys()
        apart = {parameter: relative(found[parameter], wanted[parameter]) for parameter in wanted}
        assert max(apart.values()) < 1e-5, (name, sorted(apart.items(), key=lambda item: -item[1])[:3])


def relative(found: Tensor, wanted: Tensor) -> float:
    norm = wanted.norm()
    return float((found - wanted).norm() / norm if norm else found.norm())


def test_two_ranks_of_a_group_update_as_one_process() -> None:
    check_updates(2, 2, CASES)


def test_heads_that_the_ranks_do_not_divide() -> None:
    """Four heads on three ranks."""
    check_updates(3, 3, {name: CASES[name] for name in ("off", "r3, recomputed")})


LATENT_TARGETS = {"model.lora_target_modules": ("q_b_proj", "o_proj", "down_proj", "router")}
PADDED = {"batch.packed": False}
REFERENCE = {"algorithm.beta": 0.1}
EVERYTHING = {
    f"{mode}, {name}": (mode, settings)
    for mode in MODES
    for name, settings in {"plain": {}, "recomputed": RECOMPUTED, "LoRA": LORA | RECOMPUTED, "padded": PADDED}.items()
} | {"r3, reference": ("r3", REFERENCE)}
MATRIX: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "2 ranks": (2, 2, "qwen3_moe", EVERYTHING),
    "4 ranks, keys repeated": (4, 4, "qwen3_moe", EVERYTHING),
    "2 groups of 2": (4, 2, "qwen3_moe", EVERYTHING),
    "one head of keys": (4, 4, "qwen3_moe-one-group", CASES),
    "sinks and windows": (4, 4, "gpt_oss", CASES | {"r3, padded": ("r3", PADDED)}),
    "sinks and windows, 4 heads on 3 ranks": (3, 3, "gpt_oss", CASES),
    "latent attention": (4, 4, "deepseek_v3", CASES | {"r3, LoRA": ("r3", LORA | LATENT_TARGETS)}),
    "shared experts": (2, 2, "glm4_moe", CASES),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MATRIX)
def test_any_group_updates_as_one_process(name: str) -> None:
    size, context, variant, cases = MATRIX[name]
    check_updates(size, context, cases, variant)


@pytest.mark.thorough
def test_experts_and_sequences_are_divided_together() -> None:
    """FSDP 2 x expert 2 x context 2."""
    divided = {name: (mode, settings | {"backend.expert_parallel": 2}) for name, (mode, settings) in CASES.items()}
    (alone,) = harness.run_ranks(1, context_parallel.updates_of, *policy("qwen3_moe"), CASES)
    ranks = harness.run_ranks(8, context_parallel.updates_of, *policy("qwen3_moe"), in_groups(2, divided))
    for name in CASES:
        check_same([rank[name] for rank in ranks], alone[name], name)


def test_routes_of_another_rank_are_refused() -> None:
    settings = {"backend.context_parallel": 2}
    said = harness.run_ranks(2, context_parallel.with_routes_of_the_next_rank, *policy("qwen3_moe"), settings)
    assert all("the model is fed another token than the routes belong to" in text for text in said), said


def test_a_model_whose_tokens_meet_outside_of_attention_is_refused() -> None:
    folder, _ = policy("qwen3_next")
    for said in harness.run_ranks(2, context_parallel.refusal, folder, {"backend.context_parallel": 2}):
        assert "linear_attention" in said
        assert "backend.context_parallel = 1" in said


# ---- whole runs ------------------------------------------------------------------------------------------------------


SMALL_STEPS = {"lr": 1e-4, "eps": 1e-3}  # so that rounding does not grow, see test_training.py


def backend_of(context: int, experts: int = 1) -> dict[str, Any]:
    return {"context_parallel": context, "expert_parallel": experts}


def curve(size: int, context: int, files: Any, output: Path, experts: int = 1, **overrides: Any) -> list[dict]:
    settings = {"optim": SMALL_STEPS, "rollout": {"dtype": "bfloat16"}, "backend": backend_of(context, experts)}
    arguments = (str(files.model), str(files.train), str(output), settings | overrides)
    every = harness.run_ranks(size, train_on_rank, *arguments)
    assert all(lines == every[0] for lines in every)
    return [{name: line[name] for name in COMPARED} for line in every[0]]


@pytest.mark.whole_runs
@pytest.mark.parametrize("mode", with_thorough(MODES, ("off", "r2")))
def test_a_run_in_groups_has_the_metrics_of_one_process(demo_files: Any, tmp_path: Path, mode: str) -> None:
    alone = curve(1, 1, demo_files, tmp_path / "alone", replay={"mode": mode}, steps=2)
    shared = curve(2, 2, demo_files, tmp_path / "shared", replay={"mode": mode}, steps=2)
    for one, other in zip(alone, shared, strict=True):
        assert other == pytest.approx(one, rel=2e-4, abs=1e-7)


@pytest.mark.whole_runs
@pytest.mark.parametrize(
    ("before", "after"),
    with_thorough(
        [((2, 2, 1), (1, 1, 1)), ((2, 1, 1), (4, 2, 1)), ((2, 1, 2), (1, 1, 1)), ((1, 1, 1), (2, 2, 2))],
        [((2, 1, 1), (4, 2, 1)), ((2, 1, 2), (1, 1, 1)), ((1, 1, 1), (2, 2, 2))],
    ),
    ids=str,
)
def test_a_killed_run_resumes_in_another_layout(
    demo_files: Any, tmp_path: Path, before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    """A layout is the number of ranks, how many of them share sequences, and how many divide the experts."""
    size, *groups = before
    saving = {"every": 1, "asynchronous": False, "export": False}
    whole = curve(1, 1, demo_files, tmp_path / "whole", steps=3)
    overrides = {"optim": SMALL_STEPS, "rollout": {"dtype": "bfloat16"}, "backend": backend_of(*groups)}
    arguments = (str(demo_files.model), str(demo_files.train), str(tmp_path / "killed"))
    with pytest.raises(harness.RankError):
        overrides |= {"checkpoint": saving, "steps": 9}
        harness.run_ranks(size, context_parallel.train_until_killed, *arguments, overrides)
    saved = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").glob("step-*"))
    assert saved
    assert saved[-1] < "step-00000003"
    size, context, experts = after
    resumed = curve(size, context, demo_files, tmp_path / "killed", experts, steps=3, checkpoint=saving)
    for one, other in zip(whole, resumed, strict=True):
        assert other == pytest.approx(one, rel=2e-4, abs=1e-7)
