"""The wire format: what is written is what docs/trace-format.md says, and comes back as it went."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_replay.errors import TraceError, TraceFormatError
from moe_replay.routes.trace import RouteTrace, decode_trace, encode_parts
from moe_replay.routes.trace_parts import narrowest_dtype
from tests.routes.parts import made_of
from tests.routes.wire_spec import make_trace, spec_encode, traces

SPEC = Path(__file__).parents[2] / "docs" / "trace-format.md"


@given(traces(max_tokens=700))
@settings(max_examples=40)
def test_the_writer_follows_the_specification(trace: RouteTrace) -> None:
    assert trace.to_bytes() == spec_encode(trace)


def test_the_example_of_the_specification_is_true() -> None:
    dump = re.search(r"```\n(89 4d 52 54 (?:[0-9a-f]{2}[ \n])+)```", SPEC.read_text())
    assert dump is not None
    experts = [[[299, 0], [1, 2]], [[256, 255], [4, 3]], [[0, 0], [0, 0]]]
    trace = RouteTrace([5, 7, 9], experts, [1, 3], [True, True, False], [(0, 4), (2, 5)], num_experts=300)
    assert bytes.fromhex(dump[1]) == trace.to_bytes()
    assert decode_trace(bytes.fromhex(dump[1])) == trace


# ---- there and back -------------------------------------------------------------------------------------------------


@given(traces())
@settings(max_examples=150)
def test_round_trip(trace: RouteTrace) -> None:
    blob = trace.to_bytes()
    read = decode_trace(blob)
    assert read == trace
    assert read.routed_experts.dtype == narrowest_dtype(
        trace.num_experts or int(trace.routed_experts.max(initial=0)) + 1
    )
    assert (read.token_ids.dtype, read.valid.dtype) == (np.int32, np.bool_)
    assert read.to_bytes() == blob
    assert b"".join(encode_parts(trace)) == blob


@pytest.mark.parametrize("num_experts", [2, 256, 257, 384, 512, 513, 4096, 32768])
def test_every_id_of_every_width_survives(num_experts: int) -> None:
    experts = np.arange(num_experts).reshape(-1, 1, 1)
    trace = RouteTrace(np.zeros(num_experts, int), experts, [0], num_experts=num_experts)
    assert np.array_equal(decode_trace(trace.to_bytes()).routed_experts, experts)


def test_one_trace_has_one_encoding_whatever_it_was_made_from() -> None:
    routes = make_trace(40, num_experts=None)
    narrow = RouteTrace(routes.token_ids, routes.routed_experts, range(3))
    wide = RouteTrace(routes.token_ids, routes.routed_experts.astype(int) + 500, range(3))
    joined = wide.extend(narrow)[40:]  # equal to `narrow`, but uint16
    assert joined.routed_experts.dtype == np.uint16
    assert joined.to_bytes() == narrow.to_bytes()
    by_layer = make_trace(30, coverage="none").with_uncaptured_layers([])  # coverage kept as (T, L)
    assert by_layer.to_bytes() == make_trace(30, coverage="none").to_bytes()
    picked = make_trace(600).select_layers(make_trace(600).layers)
    assert picked.to_bytes() == make_trace(600).to_bytes()


@pytest.mark.parametrize("num_experts", [256, 300, 512, 1000])
def test_narrow_ids_of_many_experts_are_written_as_wide_ones(num_experts: int) -> None:
    ids = make_trace(30).routed_experts
    narrow, wide = (made_of(make_trace(30), ids.astype(dtype), num_experts, (0, 1, 2)) for dtype in ("u1", "u2"))
    assert narrow.to_bytes() == wide.to_bytes() == spec_encode(wide)
    assert np.array_equal(decode_trace(narrow.to_bytes()).routed_experts, ids)


@pytest.mark.parametrize(("num_experts", "found"), [(256, 256), (512, 512), (32768, 32768), (32768, 65535)])
def test_an_id_with_a_bit_too_many_is_not_written(num_experts: int, found: int) -> None:
    """Where every id of so many bits is allowed, one bit more must not be lost."""
    experts = make_trace(30).routed_experts.astype(np.uint16)
    experts[-1, -1, -1] = found
    with pytest.raises(TraceFormatError, match=f"id out of range: expected below {num_experts}, found {found}"):
        made_of(make_trace(30), experts, num_experts, (0, 1, 2)).to_bytes()


def test_ids_of_one_byte_are_never_copied() -> None:
    trace = make_trace(1024)
    assert all(
        np.shares_memory(np.frombuffer(part, np.uint8), trace.routed_experts) for part in encode_parts(trace)[1:]
    )
    blob = trace.to_bytes()
    assert np.shares_memory(decode_trace(blob).routed_experts, np.frombuffer(blob, np.uint8))
    held = bytearray(blob)
    assert np.shares_memory(decode_trace(memoryview(held).toreadonly()).routed_experts, np.frombuffer(held, np.uint8))


@pytest.mark.parametrize("num_experts", [128, 384])
def test_a_reused_buffer_does_not_change_the_trace(num_experts: int) -> None:
    trace = make_trace(700, num_experts=num_experts)
    buffer = bytearray(trace.to_bytes())
    read = decode_trace(buffer)
    buffer[:] = bytes(len(buffer))
    assert read == trace


def test_a_blob_may_begin_at_any_address() -> None:
    trace = make_trace(700)
    for shift in range(1, 9):
        buffer = bytes(shift) + trace.to_bytes()
        read = decode_trace(memoryview(buffer)[shift:])
        assert read == trace
        assert read.token_ids.flags.aligned


@given(traces(), st.data())
@settings(max_examples=150)
def test_a_part_is_what_slicing_the_whole_gives(trace: RouteTrace, data: st.DataObject) -> None:
    bound = st.one_of(st.none(), st.integers(-len(trace) - 3, len(trace) + 3))
    tokens = slice(data.draw(bound), data.draw(bound))
    layers = data.draw(st.lists(st.sampled_from(trace.layers), unique=True, min_size=1).map(sorted))
    blob = trace.to_bytes()
    assert decode_trace(blob, tokens, layers) == trace[tokens].select_layers(layers)
    assert decode_trace(blob, tokens) == trace[tokens]


@pytest.mark.parametrize("tokens", [0, 5, 600])
@pytest.mark.parametrize("step", [-1, 2])
def test_a_part_is_contiguous(tokens: int, step: int) -> None:
    with pytest.raises(TraceError, match="contiguous range"):
        decode_trace(make_trace(tokens).to_bytes(), slice(None, None, step))


def test_a_part_names_layers_that_are_there() -> None:
    with pytest.raises(TraceError, match=r"no routes for a layer .* \[layer 99\]"):
        decode_trace(make_trace(5).to_bytes(), layers=[99])


def test_a_part_reads_only_its_blocks() -> None:
    trace = make_trace(1500)
    blob = bytearray(trace.to_bytes())
    blob[-1] ^= 1  # in the last block
    assert decode_trace(blob, slice(3, 1000)) == trace[3:1000]
    with pytest.raises(TraceFormatError, match="block 2 is corrupted"):
        decode_trace(blob, slice(1000, 1025))
