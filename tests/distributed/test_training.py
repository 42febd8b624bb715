"""Whole runs on several processes: the curve is that of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import PRELOADED, run_ranks
from tests.train.conftest import demo_files  # noqa: F401  a fixture
from tests.train.runs import train_on_rank

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed
PRELOADED.append("moe_replay.train.loop")

COMPARED = (
    "reward/mean",
    "loss/total",
    "loss/grad_norm",
    "loss/entropy",
    "mismatch/old_vs_train/k3_kl",
    "routing/agreement",
)


def curve(size: int, files: Any, output: Path, **overrides: Any) -> list[dict[str, float]]:
    arguments = (str(files.model), str(files.train), str(output), overrides)
    every = run_ranks(size, train_on_rank, *arguments)
    assert all(lines == every[0] for lines in every)
    return [{name: line[name] for name in COMPARED} for line in every[0]]


@pytest.mark.parametrize(("backend", "mode"), [("fsdp", "r2"), ("fsdp", "r3"), ("megatron", "r3")])
def test_one_two_and_four_processes_give_the_same_curve(
    demo_files: Any,  # noqa: F811
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
        **{"rollout": {"dtype": "bfloat16"}, "optim": optimiser},
    }
    curves = {size: curve(size, demo_files, tmp_path / str(size), **overrides) for size in (1, 2, 4)}
    for size in (2, 4):
        for one, several in zip(curves[1], curves[size], strict=True):
            assert several == pytest.approx(one, rel=2e-4, abs=1e-7), f"{size} processes"
