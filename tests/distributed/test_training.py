"""Whole runs on several processes: the curve is that of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import PRELOADED, run_ranks
from tests.train.conftest import demo_files  # noqa: F401  a fixture

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


def on_rank(model: str, data: str, output: str, overrides: dict[str, Any]) -> list[dict[str, float]]:
    from moe_replay.train.loop import train
    from tests.train.runs import tiny_config

    folder = train(tiny_config(Path(model), Path(data), Path(output), **overrides))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in COMPARED} for line in lines]


def curve(size: int, files: Any, output: Path, **overrides: Any) -> list[dict[str, float]]:
    every = run_ranks(size, on_rank, str(files.model), str(files.train), str(output), overrides, timeout=240)
    assert all(lines == every[0] for lines in every)
    return every[0]


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_one_two_and_four_processes_give_the_same_curve(demo_files: Any, tmp_path: Path, mode: str) -> None:  # noqa: F811
    overrides = {"replay": {"mode": mode}, "rollout": {"dtype": "bfloat16"}}
    curves = {size: curve(size, demo_files, tmp_path / str(size), **overrides) for size in (1, 2, 4)}
    for size in (2, 4):
        for one, several in zip(curves[1], curves[size], strict=True):
            assert several == pytest.approx(one, rel=2e-3, abs=1e-6), f"{size} processes"
