"""`moe-replay plan --traces`: loads of expert-parallel ranks from recorded traces, by tokens and balanced."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import moe_replay as mr
from moe_replay.cli.main import main
from moe_replay.errors import LayoutError, MoeReplayError
from moe_replay.routes.trace_file import TraceWriter
from moe_replay.tools.plan.balance import EpLoads, count_experts, counts_of, plan_balance, run_budget

LAYERS, EXPERTS, TOP_K, TOKENS = (1, 3), 16, 2, 10


def trace_of(first: int, num_experts: int | None = EXPERTS, tokens: int = TOKENS) -> mr.RouteTrace:
    """A sequence whose tokens all go to two experts in each layer."""
    routes = np.broadcast_to(np.array([[first, first + 1], [0, 8]], np.uint8), (tokens, len(LAYERS), TOP_K))
    return mr.RouteTrace(np.arange(tokens), routes, LAYERS, num_experts=num_experts)


def run_folder(path: Path, budget: int = 4 * TOKENS) -> Path:
    """A run with two files of 32 traces: those of the first go to the first half of the experts."""
    (path / "traces").mkdir(parents=True)
    (path / "config.toml").write_text(f"[batch]\ntokens_per_micro_batch = {budget}\n")
    for step in (1, 2):
        with TraceWriter(path / "traces" / f"step-{step:08d}.mrt") as writer:
            for number in range(32):
                writer.append(trace_of(8 * (step - 1) + 2 * (number // 8)))
    return path


def test_loads_are_those_of_the_traces(tmp_path: Path) -> None:
    counts = counts_of(run_folder(tmp_path / "run"))
    assert counts.tokens.tolist() == [TOKENS] * 64
    assert counts.rows.sum() == 64 * TOKENS * len(LAYERS) * TOP_K
    plan = plan_balance(counts, (2, 8, 5, 32), budget=4 * TOKENS)
    two, eight, other, more = plan.sizes
    # Rank 0 of two has the first half of the experts: every micro-batch of the first half of the sequences has its rows
    # in layer 1, and half of them in layer 3.
    assert (two.data_ranks, two.micro_batches) == (2, 8)
    assert (two.by_tokens, two.balanced, two.limit) == (1.5, 1.0, 1.0)
    assert (two.worst_layer, two.worst_by_tokens, two.worst_balanced) == (1, 2.0, 1.0)
    assert two.experts_gain == pytest.approx(1 / 3)
    assert eight.balanced < eight.by_tokens
    assert eight.balanced >= eight.limit == (1 + 4) / 2  # two of eight ranks have all rows of layer 3
    assert "does not divide the 16 experts" in other.problem
    assert "more ranks than experts (16)" in more.problem


def test_ranks_that_share_samples_exchange_fewer_of_them(tmp_path: Path) -> None:
    counts = counts_of(run_folder(tmp_path / "run"), limit=48)
    assert len(counts.tokens) == 48
    (shared,) = plan_balance(counts, (4,), budget=2 * TOKENS, ranks_per_sample=4, data_ranks=6).sizes
    assert (shared.data_ranks, shared.micro_batches) == (6, 4)
    (uneven,) = plan_balance(counts, (4,), budget=2 * TOKENS, data_ranks=6).sizes
    assert uneven.problem == "needs a multiple of 4 data ranks, and there are 6"
    (few,) = plan_balance(counts, (16,), budget=2 * TOKENS, data_ranks=32).sizes
    assert few.problem == "needs 64 samples for 32 data ranks, and there are 48"


def test_a_pass_gains_what_its_experts_do() -> None:
    loads = EpLoads(ep=8, by_tokens=2.0, balanced=1.0)
    assert loads.step_gain(0.0) == 0
    assert loads.step_gain(1.0) == loads.experts_gain == 0.5
    assert loads.step_gain(0.5) == pytest.approx((1.5 - 1.0) / 1.5)


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="do not know the number of experts"):
        count_experts([trace_of(0, num_experts=None)])
    assert count_experts([trace_of(0, num_experts=None)], EXPERTS).rows.shape == (1, len(LAYERS), EXPERTS)
    with pytest.raises(LayoutError, match="different models"):
        count_experts([trace_of(0), trace_of(0, num_experts=32)])
    with pytest.raises(LayoutError, match="no routes"):
        count_experts([mr.RouteTrace.uncovered(np.arange(3), LAYERS, TOP_K, num_experts=EXPERTS)])
    with pytest.raises(MoeReplayError, match=r"log\.traces"):
        counts_of(tmp_path)
    assert run_budget(tmp_path) == 8192


def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro", reason="the command line needs tyro")
    run = str(run_folder(tmp_path / "run"))
    main(["plan", "--traces", run])
    shown = capsys.readouterr().out
    assert "64 samples with 640 tokens, 2 layers, top 2 of 16 experts; at most 40 tokens a micro-batch" in shown
    assert "ep 64: more ranks than experts (16)" in shown
    main(["plan", "--traces", run, "--ep", "2", "--tokens-per-micro-batch", "20", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["sizes"]
    assert (row["ep"], row["micro_batches"], row["balanced"]) == (2, 16, 1.0)


def test_with_a_model_the_gain_of_a_pass_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro", reason="the command line needs tyro")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(num_hidden_layers=4, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    config.save_pretrained(tmp_path / "model")
    words = ["--traces", str(run_folder(tmp_path / "run")), "--ep", "2", "--model", str(tmp_path / "model")]
    main(["plan", *words, "--json"])
    plan = json.loads(capsys.readouterr().out)
    (row,) = plan["sizes"]
    assert 0 < plan["expert_fraction"] < 1
    assert 0 < row["step_gain"] < row["experts_gain"]
    main(["plan", *words])
    assert "a pass saves" in capsys.readouterr().out
