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

from tests.distributed import context_parallel, harness, megatron_training

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
    shared = {
        name: (mode, settings | {"backend.context_parallel": context}) for name, (mode, settings) in cases.items()
    }
    (alone,) = harness.run_ranks(1, context_parallel.updates_of, *policy(variant), cases)
    ranks = harness.run_ranks(size, context_parallel.updates_of, *policy(variant), shared)
    for name in cases:
        check_same([rank[name] for rank in ranks], alone[name], name)


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


def test_routes_of_another_rank_are_refused() -> None:
    settings = {"backend.context_parallel": 2}
    said = harness.run_ranks(2, context_parallel.with_routes_of_the_next_rank, *policy("qwen3_moe"), settings)
    assert all("the model is fed another token than the routes belong to" in text for text in said), said


@pytest.mark.parametrize(
    ("variant", "size", "words"),
    [
        ("qwen3_moe", 3, ("4 heads", "backend.context_parallel to one of 1, 2, 4")),
        ("qwen3_next", 2, ("linear_attention", "backend.context_parallel = 1")),
    ],
)
def test_models_whose_heads_cannot_be_exchanged_are_refused(variant: str, size: int, words: tuple[str, ...]) -> None:
    folder, _ = policy(variant)
    for said in harness.run_ranks(size, context_parallel.refusal, folder, {"backend.context_parallel": size}):
        assert all(word in said for word in words), said
