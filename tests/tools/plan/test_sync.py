"""Cost of a weight update by plan's arithmetic."""

from __future__ import annotations

import pytest

from moe_replay.tools.plan.costs import Rates, SyncCost, plan_sync, sync_text

BILLION = 10**9


def by_kind(parameters: int, **settings: int) -> dict[str, SyncCost]:
    return {cost.kind: cost for cost in plan_sync(parameters, **settings)}


def test_bytes_of_rank_0_do_not_grow_with_the_servers_but_for_http() -> None:
    one, four = by_kind(30 * BILLION), by_kind(30 * BILLION, servers=4)
    assert one["nccl"] == four["nccl"]
    assert one["nccl"].sent == 60e9
    assert four["http"].sent == 4 * one["http"].sent


@pytest.mark.parametrize("kind", ["ipc", "nccl", "http"])
def test_seconds_grow_with_the_model_and_with_its_nodes(kind: str) -> None:
    small, large = by_kind(30 * BILLION)[kind], by_kind(300 * BILLION)[kind]
    assert large.seconds == pytest.approx(10 * small.seconds)
    assert by_kind(30 * BILLION, nodes=4)[kind].seconds > small.seconds


def test_an_update_of_1_6_gb_by_http_takes_what_was_measured() -> None:
    assert by_kind(8 * BILLION // 10)["http"].seconds == pytest.approx(4.6, rel=0.05)


def test_the_text_says_what_is_assumed() -> None:
    text = sync_text(plan_sync(30 * BILLION), Rates())
    assert "network per node 12.5" in text
    assert all(kind in text for kind in ("ipc", "nccl", "http"))
