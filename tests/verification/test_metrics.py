"""Metrics of a step: sums over tokens and ranks, never means of means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.verification.metrics import MetricAccumulator
from tests.distributed.harness import run_ranks

CPU = torch.device("cpu")
TOPOLOGY = mr.MoeTopology(4, tuple(mr.routes.MoeLayer(layer, 4, 2) for layer in (1, 3)))


def accumulator() -> MetricAccumulator:
    return MetricAccumulator(
        TOPOLOGY, CPU, means=("entropy", "clipped"), totals=("loss",), pairs=("a_vs_b",), maxima=("largest",)
    )


def routes(
    experts: list, valid: list | None = None, layers: tuple[int, ...] = (1, 3)
) -> tuple[mr.RouteBatch, mr.TokenLayout]:
    """(rows, 2 layers, 2) of one sequence that is padded by one row."""
    chosen = np.array(experts, np.uint8)
    trace = mr.RouteTrace(np.arange(len(chosen)), chosen, (1, 3), valid, num_experts=4)
    layout = mr.TokenLayout.padded([len(chosen)], len(chosen) + 1)
    return mr.RouteBatch.from_traces([trace], layout, layers), layout


def test_means_are_of_all_tokens() -> None:
    metrics = accumulator()
    metrics.add_mean("entropy", torch.tensor([1.0]))
    metrics.add_mean("entropy", torch.tensor([2.0, 2.0, 2.0]))
    metrics.add_mean("clipped", torch.tensor([True, False]))
    metrics.add_total("loss", torch.tensor(0.25))
    metrics.add_total("loss", torch.tensor(0.5))
    assert metrics.reduce().metrics == {"entropy": 1.75, "clipped": 0.5, "loss": 0.75}


def test_what_was_not_measured_is_not_there() -> None:
    metrics = accumulator()
    assert metrics.reduce() == ({}, {"largest": 0.0})
    metrics.add_mean("entropy", torch.zeros(0))
    metrics.add_logprobs("a_vs_b", torch.zeros(0), torch.zeros(0))
    metrics.add_maximum("largest", torch.zeros(0))
    assert metrics.reduce() == ({}, {"largest": 0.0})
    metrics.add_total("loss", torch.tensor(0.0))
    assert metrics.reduce().metrics == {"loss": 0.0}
    metrics.clear()
    assert metrics.reduce().metrics == {}


def test_a_rank_that_reports_no_tokens_still_counts_its_routes() -> None:
    metrics = accumulator()
    metrics.add_mean("entropy", torch.tensor([1.0]))
    metrics.add_logprobs("a_vs_b", torch.zeros(2), torch.ones(2))
    metrics.add_maximum("largest", torch.ones(1))
    batch, _ = routes([[[0, 1], [2, 3]]])
    metrics.add_agreement(batch, batch)
    found = metrics.reduce(report_tokens=False)
    assert found.metrics == {
        "routing/agreement": 1.0,
        "routing/agreement/layer_001": 1.0,
        "routing/agreement/layer_003": 1.0,
    }
    assert found.maxima == {"largest": 0.0}


def test_agreement_counts_pairs_that_have_a_route() -> None:
    rollout, _ = routes([[[0, 1], [0, 1]], [[0, 1], [0, 1]], [[0, 1], [0, 1]]], valid=[True, True, False])
    native, _ = routes([[[1, 0], [0, 2]], [[0, 1], [0, 1]], [[2, 3], [2, 3]]])  # order does not matter
    metrics = accumulator()
    metrics.add_agreement(rollout, native)
    found = metrics.reduce().metrics
    assert found["routing/agreement/layer_001"] == 1.0
    assert found["routing/agreement/layer_003"] == 0.5
    assert found["routing/agreement"] == 0.75


def test_load_and_coverage_leave_padding_out() -> None:
    batch, layout = routes([[[0, 1], [0, 1]], [[0, 2], [2, 3]], [[0, 1], [0, 1]]], valid=[True, True, False])
    metrics = accumulator()
    metrics.add_load(batch, layout)
    metrics.add_coverage(batch, layout, replayed=True)
    found = metrics.reduce().metrics
    assert found["routing/replayed_fraction"] == pytest.approx(2 / 3)
    assert found["routing/unrouted_fraction"] == pytest.approx(1 / 3)
    # layer 1: loads 2, 1, 1, 0 of a mean of 1; layer 3: all alike
    assert found["routing/load_violation"] == pytest.approx((1.0 + 0.0) / 2)


def test_routes_of_some_layers_count_in_their_own_layers() -> None:
    """As of pipeline chunks: one has layer 3 only, one has no router at all."""
    replayed = [[[0, 1], [0, 1]], [[0, 1], [2, 3]]]
    last, layout = routes(replayed, layers=(3,))
    nothing, _ = routes(replayed, layers=())
    unrouted = mr.RouteBatch.recorded({}, TOPOLOGY)  # (0, 0, K): what such a chunk records
    assert nothing.num_rows != unrouted.num_rows
    metrics = accumulator()
    for recorded, native in ((last, last), (nothing, unrouted)):
        metrics.add_agreement(recorded, native)
        metrics.add_load(native, layout)
        metrics.add_coverage(native, layout, replayed=True)
    assert metrics.reduce().metrics == {
        "routing/agreement": 1.0,
        "routing/agreement/layer_003": 1.0,
        "routing/replayed_fraction": 1.0,
        "routing/unrouted_fraction": 0.0,
        "routing/load_violation": 0.0,
    }


def test_mismatches_combine_exactly() -> None:
    metrics = accumulator()
    metrics.add_logprobs("a_vs_b", torch.tensor([0.0]), torch.tensor([0.1]))
    metrics.add_logprobs("a_vs_b", torch.tensor([0.0, 0.0]), torch.tensor([-0.2, 1.0]))
    found = metrics.reduce().metrics
    assert found["mismatch/a_vs_b/logprob_abs_diff/mean"] == pytest.approx(1.3 / 3)
    assert found["mismatch/a_vs_b/logprob_abs_diff/max"] == pytest.approx(1.0)
    assert found["mismatch/a_vs_b/frac_ratio_gt2"] == pytest.approx(1 / 3)


def test_a_maximum_that_is_not_a_number_is_infinite() -> None:
    metrics = accumulator()
    metrics.add_maximum("largest", torch.tensor([0.5, math.nan]))
    metrics.add_maximum("largest", torch.tensor([0.7]))
    assert metrics.reduce().maxima == {"largest": math.inf}


# ---- ranks ----------------------------------------------------------------------------------------------------------

GIVEN = [[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[1, 2], [2, 3]]]
OTHER = [[[0, 1], [0, 2]], [[0, 3], [2, 3]], [[1, 2], [1, 3]]]


def add_share(metrics: MetricAccumulator, share: int) -> None:
    """Share 0: tokens and routes of layer 1; share 1: other tokens and routes of layer 3; share 2: nothing at all."""
    if share == 2:
        return
    values = torch.linspace(-1, 1, 5)[2 * share : 3 + 2 * share]
    metrics.add_mean("entropy", values)
    metrics.add_total("loss", values.sum())
    metrics.add_logprobs("a_vs_b", torch.zeros_like(values), values)
    metrics.add_maximum("largest", values.abs() + share)
    layers = (1,) if share == 0 else (3,)
    (replayed, layout), (other, _) = routes(GIVEN, layers=layers), routes(OTHER, layers=layers)
    metrics.add_agreement(replayed, other)
    metrics.add_load(replayed, layout)
    metrics.add_coverage(replayed, layout, replayed=True)


def reduce_on_rank() -> tuple[dict[str, float], dict[str, float], int]:
    """What this rank gets, and how many collectives that takes; rank 3 has the tokens of rank 0, and does not count."""
    rank = torch.distributed.get_rank()
    metrics = accumulator()
    add_share(metrics, rank if rank < 3 else 2)
    if rank == 3:
        metrics.add_mean("entropy", torch.full((5,), 100.0))
        metrics.add_maximum("largest", torch.full((5,), 100.0))
    calls = []
    real = torch.distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    torch.distributed.all_reduce = counted
    found = metrics.reduce(report_tokens=rank != 3)
    return found.metrics, found.maxima, len(calls)


@pytest.mark.distributed
def test_ranks_together_measure_what_one_would() -> None:
    alone = accumulator()
    add_share(alone, 0)
    add_share(alone, 1)
    expected = alone.reduce()
    for metrics, maxima, collectives in run_ranks(4, reduce_on_rank):
        assert metrics == pytest.approx(expected.metrics, rel=1e-14)
        assert maxima == expected.maxima == {"largest": 2.0}
        assert collectives == 1
