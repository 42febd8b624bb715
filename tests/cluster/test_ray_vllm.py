"""The real vLLM as an engine of a run on Ray, beside the trainer on another node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from tests.cluster.local_cluster import ray_cluster, train_on
from tests.train.runs import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.thorough]


def test_routes_of_vllm_are_replayed(demo_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe compares the weights after each update, and routes of the rollout are those that the trainer takes."""
    for name, value in {"LOGGING_LEVEL": "WARNING", "CPU_OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(f"VLLM_{name}", value)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a third of the CPU time of a start
    options = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**26}
    config = tiny_config(
        demo_files.model,
        demo_files.train,
        tmp_path / "run",
        steps=2,
        backend={"device": "cpu"},
        rollout={"engine": "vllm", "dtype": "float32", "options": options, "probe_tolerance": 1e-3},
        checkpoint={"every": 0},
        cluster={"engines": 1},
    )
    with ray_cluster(2, cpus=1) as nodes:
        assert train_on(nodes, config) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["routing/replayed_fraction"] > 0.5 for line in lines)
    assert all(line["mismatch/rollout_vs_old/k3_kl"] < 1e-6 for line in lines)
