"""What several ranks hold is written by one of them, and all of them write."""

from __future__ import annotations

from collections import Counter

import numpy as np

from moe_replay.train.backends.rank_state import chosen, signature


def test_each_part_has_one_writer_that_holds_it_and_writers_share_the_work() -> None:
    parts = [signature([f"layer {number}[0:4/4]"]) for number in range(400)]
    own = signature(["of rank 1[0:2/4]"])
    held = [parts[:200], [*parts[:200], own], parts[200:], parts[200:]]
    by_rank = [np.array(one, np.uint64) for one in held]
    found = [chosen(one, by_rank) for one in held]
    assert found[0] == {part: found[1][part] for part in parts[:200]}
    assert found[2] == found[3]
    assert found[1][own] == 1
    written = Counter(rank for one in (found[0], found[2]) for rank in one.values())
    assert written.keys() == {0, 1, 2, 3}
    assert min(written.values()) > 70


def test_a_part_is_known_by_its_regions_in_any_order() -> None:
    assert signature(["a[0:1/2]", "b"]) == signature(["b", "a[0:1/2]"])
    assert signature(["a[0:1/2]"]) != signature(["a[1:2/2]"])
