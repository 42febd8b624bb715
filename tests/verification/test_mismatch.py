"""Mismatch numbers against plain formulas, and their combination over micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.verification.metrics import Mismatch

LOGPROBS = st.lists(st.tuples(st.floats(-8, 0), st.floats(-8, 0)), min_size=1, max_size=20)


@given(pairs=LOGPROBS)
def test_against_plain_formulas(pairs):
    sampled, scored = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    found = Mismatch.between(sampled, scored).summary()
    ratios = [math.exp(b - a) for a, b in pairs]
    n = len(pairs)
    expected = {
        "k1_kl": sum(a - b for a, b in pairs) / n,
        "k3_kl": sum(r - 1 - math.log(r) for r in ratios) / n,
        "logprob_abs_diff/mean": sum(abs(a - b) for a, b in pairs) / n,
        "logprob_abs_diff/max": max(abs(a - b) for a, b in pairs),
        "ratio/mean": sum(ratios) / n,
        "ratio/max": max(ratios),
        "ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "frac_ratio_gt2": sum(max(r, 1 / r) > 2 for r in ratios) / n,
    }
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(pairs=LOGPROBS, cut=st.integers(0, 20))
def test_parts_combine_exactly(pairs, cut):
    """Also where one part is empty; a mean of means would differ."""
    sampled, scored = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    parts = Mismatch.between(sampled[:cut], scored[:cut]) + Mismatch.between(sampled[cut:], scored[cut:])
    assert parts.summary() == pytest.approx(Mismatch.between(sampled, scored).summary(), rel=1e-12, abs=1e-12)


def test_masked_tokens_do_not_count():
    sampled, scored = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -9.0])
    found = Mismatch.between(sampled, scored, torch.tensor([1, 0])).summary()
    assert found["logprob_abs_diff/max"] == 0.5
    assert Mismatch.between(sampled, scored, torch.tensor([0, 0])).summary() == {}


@pytest.mark.parametrize("distance", [-math.inf, -800.0, 400.0, 800.0, math.inf, math.nan])
def test_log_probs_too_far_apart_are_numbers_too_and_no_crash(distance):
    found = Mismatch.between(torch.tensor([0.0]), torch.tensor([distance])).summary()
    assert not found["ess"] > 0
    assert abs(found["k1_kl"]) >= 400 or math.isnan(distance)


def test_equal_logprobs_have_no_mismatch():
    same = torch.randn(10)
    found = Mismatch.between(same, same).summary()
    assert (found["k1_kl"], found["k3_kl"], found["frac_ratio_gt2"]) == (0, 0, 0)
    assert (found["ratio/mean"], found["ess"]) == (1, 1)
