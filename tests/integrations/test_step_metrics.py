"""Metrics that plug-ins put among those of another trainer."""

from __future__ import annotations

import pytest
import torch

import moe_replay as mr
from moe_replay.integrations.hosts import ReplaySettings
from moe_replay.integrations.step_metrics import StepMetrics
from moe_replay.verification.metrics import MetricAccumulator, k3
from tests.models import tiny_qwen3_moe


@pytest.fixture
def metrics() -> StepMetrics:
    topology = mr.MoeTopology.from_config(tiny_qwen3_moe().config)
    return StepMetrics(topology, torch.device("cpu"), ReplaySettings(mode="R3", check_every=0))


def test_k3_without_replay_stands_beside_that_of_the_same_tokens(metrics) -> None:
    first, second = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)) - 4
    mask = torch.ones(3, 5, dtype=torch.bool)
    metrics.add_logprobs(first, first + 0.2, mask, replayed=False)
    metrics.add_logprobs(first, first + 0.1, mask, replayed=True)
    metrics.add_logprobs(second, second + 3, mask, replayed=True)  # outliers in a micro-batch that was not compared
    found = metrics.finish(is_update=True)
    expected = {offset: k3(torch.tensor(offset)).item() for offset in (0.1, 0.2, 3.0)}
    assert found["moe_replay/k3_native"] == pytest.approx(expected[0.2], rel=1e-4)
    assert found["moe_replay/k3_paired"] == pytest.approx(expected[0.1], rel=1e-4)
    assert found["moe_replay/k3"] == pytest.approx((expected[0.1] + expected[3.0]) / 2, rel=1e-4)


def test_nothing_is_paired_in_an_update_without_a_comparison(metrics) -> None:
    sampled, mask = torch.full((1, 4), -3.0), torch.ones(1, 4, dtype=torch.bool)
    metrics.add_logprobs(sampled, sampled, mask, replayed=False)
    assert "moe_replay/k3_native" in metrics.finish(is_update=True)
    metrics.add_logprobs(sampled, sampled, mask, replayed=True)
    found = metrics.finish(is_update=True)
    assert "moe_replay/k3" in found
    assert not {"moe_replay/k3_native", "moe_replay/k3_paired"} & set(found)


@pytest.mark.parametrize(("check_every", "expected"), [(0, 0), (1, 40), (2, 20), (3, 14), (10, 4)])
def test_updates_are_checked_and_report_whatever_passes_stand_between_them(check_every, expected) -> None:
    topology = mr.MoeTopology.from_config(tiny_qwen3_moe().config)
    settings = ReplaySettings(mode="R3", check_every=check_every)
    metrics = StepMetrics(topology, torch.device("cpu"), settings)
    checked = reported = 0
    for _ in range(40):  # steps of an old-log-prob pass and an update
        metrics.finish(is_update=False)
        checked += metrics.checks(is_update=True)
        reported += "moe_replay/evidence" in metrics.finish(is_update=True)
    assert checked == reported == expected


def test_samples_without_routes_are_counted(metrics) -> None:
    metrics.add_samples([True, False, False])
    metrics.add_samples([True, True])
    assert metrics.finish(is_update=True)["moe_replay/samples_without_routes"] == 3


def test_samples_are_counted_where_the_sums_are(monkeypatch) -> None:
    """On a GPU a sum takes no values of the host."""
    added = []
    monkeypatch.setattr(MetricAccumulator, "add_total", lambda self, name, value: added.append(value.device.type))
    topology = mr.MoeTopology.from_config(tiny_qwen3_moe().config)
    StepMetrics(topology, torch.device("meta"), ReplaySettings(mode="R3")).add_samples([True, False])
    assert added == ["meta"]
