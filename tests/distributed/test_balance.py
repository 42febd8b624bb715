"""Micro-batches by the load of expert-parallel ranks: another grouping of the same samples, and the same gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_replay.train.learn.balance import LOAD, LOAD_BY_TOKENS, LOAD_LIMIT, Units, expert_rows, loads_of, spread_evenly
from tests.distributed import harness, megatron_training
from tests.support.trajectory_bytes import trajectories_from_bytes
from tests.train.runs import train_on_rank

pytest.importorskip("transformers.integrations.moe", reason="Transformers 4 has no experts by name")
pytest.importorskip("pydantic")

LENGTHS = (11,) * 8 + (8,) * 4 + (12,) * 4  # those of one length can change places
EP2 = {"expert_parallel": 2}
ETP1 = {"expert_tensor_parallel": 1}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    folder: Path = tmp_path_factory.mktemp("policy")
    return str(folder), megatron_training.save_policy(folder, lengths=LENGTHS)


@pytest.mark.parametrize(
    ("size", "kind", "settings", "exchange"),
    [
        (2, "fsdp", EP2 | {"packed": True}, (2, 2)),
        pytest.param(4, "fsdp", EP2, (2, 2), marks=pytest.mark.thorough),
        pytest.param(2, "megatron", EP2 | {"packed": True}, (2, 2), marks=pytest.mark.thorough),
        pytest.param(
            *(4, "megatron", EP2 | ETP1 | {"tensor_parallel": 2, "pipeline_parallel": 2, "packed": True}, (2, 1)),
            marks=pytest.mark.thorough,
        ),
        pytest.param(4, "megatron", EP2 | ETP1 | {"tensor_parallel": 2}, (2, 1), marks=pytest.mark.thorough),
    ],
)
def test_the_same_samples_have_the_same_gradient(
    policy: tuple[str, bytes], size: int, kind: str, settings: dict[str, Any], exchange: tuple[int, int]
) -> None:
    if kind == "megatron":
        pytest.importorskip("megatron.core")
    ranks = harness.run_ranks(size, megatron_training.balanced_update, *policy, kind, settings)
    assert {rank["experts"]["exchange"][:2] for rank in ranks} == {exchange}
    rows = [{rank[name]["data_rank"]: rank[name]["rows"] for rank in ranks} for name in ("tokens", "experts")]
    assert rows[0] != rows[1], "nothing has changed places"
    for update in range(2):
        trained = [sorted(i for one in by_rank.values() for bin_ in one[update] for i in bin_) for by_rank in rows]
        assert trained[0] == trained[1] == list(range(8 * update, 8 * update + 8))
    losses = [[sum(of) for of in zip(*(rank[name]["losses"] for rank in ranks), strict=True)] for name in ranks[0]]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6, abs=1e-6)
    for rank in ranks:
        assert rank["experts"]["norms"] == pytest.approx(rank["tokens"]["norms"], rel=1e-5)
    by_name = [{row: value for rank in ranks for row, value in rank[name]["scores"].items()} for name in ranks[0]]
    assert by_name[0].keys() == by_name[1].keys() == set(range(len(LENGTHS)))
    for row, values in by_name[0].items():
        torch.testing.assert_close(by_name[1][row], values, rtol=1e-5, atol=2e-6)
    for name, weight in ranks[0]["tokens"]["weights"].items():
        torch.testing.assert_close(ranks[0]["experts"]["weights"][name], weight, rtol=1e-5, atol=1e-6, msg=name)
    check_metrics(policy[1], ranks, rows, exchange)


def check_metrics(
    data: bytes, ranks: list[dict[str, Any]], rows: list[dict[int, Any]], exchange: tuple[int, int]
) -> None:
    """They are the loads of the micro-batches that were trained, counted from the routes."""
    (metrics,) = {tuple(sorted(rank["experts"]["metrics"].items())) for rank in ranks}
    found = dict(metrics)
    trajectories = trajectories_from_bytes(data)
    tokens = np.array([len(one) for one in trajectories])
    counted = np.stack([expert_rows(one.trace, exchange[0], 8) for one in trajectories])
    units = Units(tokens, spread_evenly(counted, tokens, trajectories[0].trace.top_k))
    for name, by_rank in zip((LOAD_BY_TOKENS, LOAD), rows, strict=True):
        loads = [
            loads_of([by_rank[rank][update] for rank in sorted(by_rank)], units, exchange[1]) for update in range(2)
        ]
        assert found[name] == pytest.approx((loads[0] + loads[1]).ratio)
    assert 1 <= found[LOAD_LIMIT] <= found[LOAD] < found[LOAD_BY_TOKENS]


@pytest.mark.whole_runs
def test_a_run_says_how_even_its_ranks_are(demo_files: Any, tmp_path: Path) -> None:
    batch = {"balance": "experts", "tokens_per_micro_batch": 24}
    overrides = {"steps": 1, "backend": EP2, "replay": {"mode": "r3"}, "batch": batch}
    arguments = (str(demo_files.model), str(demo_files.train), str(tmp_path / "run"), overrides)
    ((found,), other) = harness.run_ranks(2, train_on_rank, *arguments)
    assert [found] == other
    assert 1 < found[LOAD_LIMIT] <= found[LOAD] <= found[LOAD_BY_TOKENS]
    assert found["batch/shared_tokens"] > 0
