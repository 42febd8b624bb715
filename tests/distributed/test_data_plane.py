"""The goals of benchmarks/data_plane.py, at a size that takes a second."""

from __future__ import annotations

import pytest

from benchmarks.data_plane import TOKEN_BYTES, row, run

SEQUENCES, TOKENS = 4, 16384
SHARE = SEQUENCES * TOKENS * TOKEN_BYTES


@pytest.mark.parametrize("way", ["one machine", "machines"])
def test_a_rank_receives_its_share_and_holds_little_more(way: str) -> None:
    costs = run(way, 3, SEQUENCES, TOKENS)
    for cost in costs[1:]:
        assert SHARE < cost.received <= 1.1 * SHARE
        assert cost.peak <= 1.5 * SHARE
    assert row(way, 3, SEQUENCES, TOKENS, costs).startswith(f"| 3 | 77 MB | {way} | 1.00 x |")
