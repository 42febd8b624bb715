"""Byte and bit planes against their definition in docs/trace-format.md, written out id by id."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_replay.routes.codec import ID_GROUP, pack_ids, smallest_id_bits, unpack_ids


@given(st.integers(9, 15), st.integers(1, 5), st.integers(0, 2**32))
@settings(max_examples=60)
def test_planes_are_those_of_the_specification_and_come_back(id_bits: int, groups: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 1 << id_bits, groups * ID_GROUP).astype(np.uint16)
    block = np.full(len(ids) // 8 * id_bits, 0xEE, np.uint8)
    pack_ids(ids, id_bits, block)
    assert block[: len(ids)].tolist() == [i & 255 for i in ids.tolist()]
    for bit in range(8, id_bits):
        plane = block[len(ids) + (bit - 8) * len(ids) // 8 :].tolist()
        assert [plane[j // 8] >> j % 8 & 1 for j in range(len(ids))] == [i >> bit & 1 for i in ids.tolist()]
    out = np.full(len(ids), 0xEEEE, np.uint16)
    unpack_ids(block, id_bits, out)
    assert np.array_equal(out, ids)


def test_packing_leaves_the_ids_alone() -> None:
    ids = np.arange(1024, dtype=np.uint16)
    ids.flags.writeable = False
    block = np.empty(1024 // 8 * 10, np.uint8)
    pack_ids(ids, 10, block)
    assert ids.tolist() == list(range(1024))


@pytest.mark.parametrize(
    ("num_ids", "bits"), [(1, 8), (256, 8), (257, 9), (384, 9), (512, 9), (513, 10), (1024, 10), (32768, 15)]
)
def test_bits_of_an_id(num_ids: int, bits: int) -> None:
    assert smallest_id_bits(num_ids) == bits
