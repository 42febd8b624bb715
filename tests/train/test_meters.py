"""Numbers of a step: sums over tokens and ranks, never means of means."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.train import launch
from moe_replay.train.meters import Meters

TOPOLOGY = mr.MoeTopology(4, tuple(mr.routes.MoeLayer(layer, 4, 2) for layer in (1, 3)))


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with launch.process_group(torch.device("cpu")):
        yield


def routes(experts: list, valid: list | None = None) -> tuple[mr.RouteBatch, mr.TokenLayout]:
    """(rows, 2 layers, 2) of one sequence that is padded by one row."""
    chosen = np.array(experts, np.uint8)
    trace = mr.RouteTrace(np.arange(len(chosen)), chosen, (1, 3), valid, num_experts=4)
    layout = mr.TokenLayout.padded([len(chosen)], len(chosen) + 1)
    return mr.RouteBatch.from_traces([trace], layout), layout


def test_means_are_of_all_tokens() -> None:
    meters = Meters(TOPOLOGY)
    meters.mean("entropy", torch.tensor([1.0]))
    meters.mean("entropy", torch.tensor([2.0, 2.0, 2.0]))
    meters.mean("clipped", torch.tensor([True, False]))
    meters.sum("loss", torch.tensor(0.25))
    meters.sum("loss", torch.tensor(0.5))
    found = meters.combined(reports=True).metrics
    assert found == {"entropy": 1.75, "clipped": 0.5, "loss": 0.75}


def test_a_rank_that_reports_no_token_metrics_still_counts_its_routes() -> None:
    meters = Meters(TOPOLOGY)
    meters.mean("entropy", torch.tensor([1.0]))
    meters.mismatch("a_vs_b", torch.zeros(2), torch.ones(2))
    batch, _ = routes([[[0, 1], [2, 3]]])
    meters.agreement(batch, batch)
    found = meters.combined(reports=False).metrics
    assert found == {"routing/agreement": 1.0, "routing/agreement/layer_001": 1.0, "routing/agreement/layer_003": 1.0}


def test_agreement_counts_pairs_that_have_a_route() -> None:
    rollout, _ = routes([[[0, 1], [0, 1]], [[0, 1], [0, 1]], [[0, 1], [0, 1]]], valid=[True, True, False])
    native, _ = routes([[[1, 0], [0, 2]], [[0, 1], [0, 1]], [[2, 3], [2, 3]]])  # order does not matter
    meters = Meters(TOPOLOGY)
    meters.agreement(rollout, native)
    found = meters.combined(reports=True).metrics
    assert found["routing/agreement/layer_001"] == 1.0
    assert found["routing/agreement/layer_003"] == 0.5
    assert found["routing/agreement"] == 0.75


def test_load_and_coverage_leave_padding_out() -> None:
    batch, layout = routes([[[0, 1], [0, 1]], [[0, 2], [2, 3]], [[0, 1], [0, 1]]], valid=[True, True, False])
    meters = Meters(TOPOLOGY)
    meters.routes([batch], layout, replayed=True)
    found = meters.combined(reports=True).metrics
    assert found["routing/replayed_fraction"] == pytest.approx(2 / 3)
    assert found["routing/unrouted_fraction"] == pytest.approx(1 / 3)
    # layer 1: loads 2, 1, 1, 0 of a mean of 1; layer 3: all alike
    assert found["routing/load_violation"] == pytest.approx((1.0 + 0.0) / 2)


def test_mismatches_combine_exactly() -> None:
    meters = Meters(TOPOLOGY)
    meters.mismatch("a_vs_b", torch.tensor([0.0]), torch.tensor([0.1]))
    meters.mismatch("a_vs_b", torch.tensor([0.0, 0.0]), torch.tensor([-0.2, 1.0]))
    found = meters.combined(reports=True).metrics
    assert found["mismatch/a_vs_b/logprob_abs_diff/mean"] == pytest.approx(1.3 / 3)
    assert found["mismatch/a_vs_b/logprob_abs_diff/max"] == pytest.approx(1.0)
    assert found["mismatch/a_vs_b/beyond_two"] == pytest.approx(1 / 3)
