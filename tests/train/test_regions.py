from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.train.backends import regions
from moe_replay.train.backends.regions import Region


def elements(region: Region) -> set[tuple[int, ...]]:
    return set(itertools.product(*region))


def cut(size: int, step: int) -> st.SearchStrategy[range]:
    ends = st.tuples(st.integers(0, size - 1), st.integers(0, size)).map(sorted)
    return ends.map(lambda both: range(both[0], both[1] + 1, step))


@given(st.tuples(cut(6, 1), cut(8, 2)), st.tuples(cut(6, 1), cut(8, 2)))
def test_overlap_and_rest_are_those_of_sets(one: Region, other: Region) -> None:
    common = regions.overlap(one, other)
    assert (elements(common) if common is not None else set()) == elements(one) & elements(other)
    if common is None:
        return
    rest = [elements(part) for part in regions.without(one, common)]
    assert sum(map(len, rest)) == len(elements(one)) - len(elements(common))
    assert set().union(*rest) == elements(one) - elements(other)
    whole = torch.arange(100).reshape(10, 10)
    held = whole[tuple(slice(part.start, part.stop, part.step) for part in one)]
    wanted = whole[tuple(slice(part.start, part.stop, part.step) for part in common)]
    assert torch.equal(held[regions.inside(common, one)], wanted)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 64), st.integers(0, 64))
def test_boxes_cover_a_flat_range_in_order(shape: list[int], first: int, last: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    last = min(last, whole.numel())
    covered = []
    for start, box in regions.boxes(shape, first, last):
        inside = whole[tuple(slice(one.start, one.stop) for one in box)].flatten().tolist()
        assert inside == list(range(start, start + len(inside)))
        covered += inside
    assert covered == list(range(first, last))


@pytest.mark.parametrize(
    ("name", "shape", "region"),
    [
        ("model.a[1].weight", (4, 8), (range(1, 3), range(8))),
        ("a", (8,), (range(1, 8, 2),)),
        ("a", (4, 3), (range(4, 4), range(3))),
        ("a.step", (), ()),
    ],
)
def test_names_in_files_are_read_back(name: str, shape: tuple[int, ...], region: Region) -> None:
    assert regions.parse(regions.key(name, shape, region)) == (name, shape, region)
