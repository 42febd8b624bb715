"""Route agreement: sets, not orders; covered rows only."""

from __future__ import annotations

import pytest
import torch

import moe_replay as mr
from moe_replay.verification.agreement import route_agreement, same_experts


def batch(rows, valid=None):
    layout = mr.TokenLayout.padded([len(rows)])
    trace = mr.RouteTrace(range(len(rows)), [[row] for row in rows], [2], valid, num_experts=8)
    return mr.RouteBatch.from_traces([trace], layout)


def test_order_does_not_matter():
    one, other = batch([[0, 1], [2, 3], [4, 5]]), batch([[1, 0], [2, 4], [4, 5]])
    assert same_experts(one, other).tolist() == [[True, False, True]]
    assert route_agreement(one, other).tolist() == pytest.approx([2 / 3])


def test_only_rows_that_both_cover_count():
    one = batch([[0, 1], [2, 3], [4, 5]], [True, True, False])
    other = batch([[1, 0], [2, 4], [6, 5]])
    assert route_agreement(one, other).tolist() == [0.5]
    nothing = batch([[0, 1], [2, 3], [4, 5]], [False] * 3)
    assert torch.isnan(route_agreement(nothing, other)).all()


def test_other_layers_cannot_be_compared():
    layout = mr.TokenLayout.padded([1])
    shifted = mr.RouteBatch.from_traces([mr.RouteTrace([0], [[[0, 1]]], [3], num_experts=8)], layout)
    with pytest.raises(mr.AlignmentError, match="same layers and rows"):
        route_agreement(batch([[0, 1]]), shifted)
