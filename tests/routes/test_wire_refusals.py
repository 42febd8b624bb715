"""The wire format: everything that must fail, and what the errors say."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_replay.errors import TraceError, TraceFormatError
from moe_replay.routes.codec import Limits, block_digest
from moe_replay.routes.trace import RouteTrace, decode_trace, encode_parts
from tests.routes.parts import made_of, trace_from_parts
from tests.routes.wire_spec import make_trace, spec_digest, spec_encode

# ---- damage ----------------------------------------------------------------------------------------------------------


def is_refused(blob: bytes | bytearray) -> bool:
    """Whether reading fails in the one way it may fail; any other exception is the test's failure."""
    try:
        decode_trace(blob)
    except TraceFormatError:
        return True
    return False


SMALL = [
    make_trace(3, 2, 2),
    make_trace(0),
    make_trace(9, 2, 3, 300, coverage="token_layers", spans=3),
    make_trace(5, 2, 2, None, coverage="tokens"),
]


@pytest.mark.slow
def test_every_change_of_one_byte_is_refused() -> None:
    blob = make_trace(1, 1, 1).to_bytes()
    for position in range(len(blob)):
        harmed = bytearray(blob)
        for change in range(1, 256):
            harmed[position] = blob[position] ^ change
            assert is_refused(harmed), f"byte {position} ^ {change}"


@pytest.mark.parametrize("trace", SMALL, ids=str)
def test_every_flipped_bit_is_refused(trace: RouteTrace) -> None:
    blob = trace.to_bytes()
    for bit in range(8 * len(blob)):
        harmed = bytearray(blob)
        harmed[bit // 8] ^= 1 << bit % 8
        assert is_refused(harmed), f"bit {bit}"


@pytest.mark.parametrize("trace", [*SMALL, make_trace(600, 1, 1)], ids=str)
def test_every_truncation_and_every_tail_is_refused(trace: RouteTrace) -> None:
    blob = trace.to_bytes()
    assert all(is_refused(blob[:size]) for size in range(len(blob)))
    assert all(is_refused(blob + tail) for tail in (b"\0", bytes(8), bytes(64), blob))


@given(st.data())
@settings(max_examples=300)
def test_random_damage_is_refused(data: st.DataObject) -> None:
    blob = data.draw(st.sampled_from([*SMALL, make_trace(700, num_experts=384)])).to_bytes()
    start = data.draw(st.integers(0, len(blob) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=min(200, len(blob) - start)))
    harmed = blob[:start] + noise + blob[start + len(noise) :]
    assert harmed == blob or is_refused(harmed)


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_noise_is_refused(noise: bytes) -> None:
    assert is_refused(noise)
    assert is_refused(b"\x89MRT\r\n\x1a\n\x01\x00" + noise)


@pytest.mark.parametrize("num_experts", [128, 384])
@pytest.mark.parametrize("unit", [1, 8, 12, 24, 512, 4096, 512 * 12])
def test_exchanged_pieces_are_refused(num_experts: int, unit: int) -> None:
    """Bytes, words, token rows, rows of the checksum's matrix, whole blocks."""
    blob = make_trace(2048, 3, 4, num_experts).to_bytes()
    payload = len(blob) - 2048 * 12 // 8 * (8 if num_experts == 128 else 9)
    rng = np.random.default_rng(0)
    for _ in range(100):
        first, second = (payload + unit * int(i) for i in rng.permutation((len(blob) - payload) // unit)[:2])
        harmed = bytearray(blob)
        harmed[first : first + unit], harmed[second : second + unit] = (
            blob[second : second + unit],
            blob[first : first + unit],
        )
        assert harmed == blob or is_refused(harmed)


@pytest.mark.parametrize("trace", SMALL, ids=str)
def test_blobs_spliced_from_two_traces_are_refused(trace: RouteTrace) -> None:
    ours = trace.to_bytes()
    other = trace_from_parts(
        trace.token_ids[::-1] // 2,
        trace.routed_experts[::-1],
        trace.layers,
        trace._coverage[::-1],
        trace.versions,
        None,
    )
    theirs = other.to_bytes()
    for cut in range(1, min(len(ours), len(theirs))):
        for spliced in (ours[:cut] + theirs[cut:], theirs[:cut] + ours[cut:]):
            assert spliced in (ours, theirs) or is_refused(spliced), f"cut at {cut}"


def test_the_polynomial_divides_no_change_that_one_byte_can_make_to_a_sum() -> None:
    """A changed byte adds d·2^k to a sum: up to 8 changed bits, then a run of ones made by the carry."""
    unchanged = zlib.crc32(bytes(9))
    for changed in range(1, 256):
        for run in range(57):
            pattern = changed | ((1 << run) - 1) << 8
            assert zlib.crc32(pattern.to_bytes(9, "little")) != unchanged


@given(st.integers(1, 1600), st.integers(0, 2**32))
@settings(max_examples=60)
def test_the_block_checksum_is_that_of_the_specification(words: int, seed: int) -> None:
    block = np.random.default_rng(seed).integers(0, 256, 8 * words, dtype=np.uint8)
    assert block_digest(block) == spec_digest(block.tobytes())


# ---- lies: checksums hold, content does not -------------------------------------------------------------------------


def patched(blob: bytes, changes: dict[int, bytes]) -> bytes:
    harmed = bytearray(blob)
    for offset, new in changes.items():
        harmed[offset : offset + len(new)] = new
    return bytes(harmed)


def resealed(blob: bytes, spans: int, payload_at: int) -> bytes:
    """A blob of at most one block with checksums that hold, as somebody who lies would write it."""
    if blob[payload_at:]:
        blob = patched(blob, {64 + 16 * spans: struct.pack("<Q", spec_digest(blob[payload_at:]))})
    blob = patched(blob, {56: struct.pack("<I", zlib.crc32(blob[64:payload_at]))})
    return patched(blob, {60: struct.pack("<I", zlib.crc32(blob[:60]))})


# Spans at 64, checksum at 80, layers at 88, token ids at 96, bitmap at 136, payload at 192.
ROUTES = {"token_ids": [7] * 10, "routed_experts": [[[0, 1], [2, 3]]] * 10, "layers": [4, 6]}
PLAIN = RouteTrace(**ROUTES, num_experts=4)
UNKNOWN = RouteTrace(**ROUTES)
PACKED = RouteTrace(**ROUTES, num_experts=300)
PARTLY = RouteTrace(**ROUTES, valid=[True] * 9 + [False], num_experts=4)
BY_LAYER = RouteTrace(**ROUTES, valid=[[True, i < 5] for i in range(10)], num_experts=4)
TWO_SPANS = RouteTrace(**ROUTES, weight_version=[(0, 1), (5, 2)], num_experts=4)
NOTHING = PLAIN[:0]

LIES: list[tuple[RouteTrace, dict[int, bytes], str]] = [
    (PLAIN, {8: b"\2"}, "version at byte 8: another format version: expected 1, found 2"),
    (PLAIN, {10: b"\2"}, "codec at byte 10: wrong value: expected 1, found 2"),
    (PLAIN, {11: b"\x09"}, "id_bits at byte 11: out of range: expected 8 to 8, found 9"),
    (PACKED, {11: b"\x08"}, "id_bits at byte 11: out of range: expected 9 to 9, found 8"),
    (UNKNOWN, {11: b"\x10"}, "id_bits at byte 11: out of range: expected 8 to 15, found 16"),
    (PLAIN, {12: b"\3"}, "coverage at byte 12: out of range: expected 0 to 2, found 3"),
    (NOTHING, {12: b"\1"}, "coverage at byte 12: out of range: expected 0 to 0, found 1"),
    (PLAIN, {13: b"\x80"}, "flags at byte 13: wrong value: expected 0, found 128"),
    (PLAIN, {14: b"\0"}, "top_k at byte 14: out of range: expected 1 to 4, found 0"),
    (PLAIN, {14: b"\5"}, "top_k at byte 14: out of range: expected 1 to 4, found 5"),
    (UNKNOWN, {14: b"\xff\xff"}, "top_k at byte 14: out of range: expected 1 to 1024, found 65535"),
    (PLAIN, {16: b"\0"}, "num_layers at byte 16: out of range: expected 1 to 4096, found 0"),
    (PLAIN, {16: b"\xff" * 4}, "num_layers at byte 16: out of range: expected 1 to 4096, found 4294967295"),
    (PLAIN, {20: b"\1\x80"}, "num_experts at byte 20: out of range: expected 0 to 32768, found 32769"),
    (PLAIN, {29: b"\1"}, "num_tokens at byte 24: out of range: expected 0 to 16777216, found 1099511627786"),
    (PLAIN, {32: b"\0"}, "num_spans at byte 32: out of range: expected 1 to 10, found 0"),
    (PLAIN, {32: b"\x0b"}, "num_spans at byte 32: out of range: expected 1 to 10, found 11"),
    (NOTHING, {32: b"\2"}, "num_spans at byte 32: out of range: expected 1 to 1, found 2"),
    (PLAIN, {36: b"\1"}, "reserved at byte 36: wrong value: expected 0, found 1"),
    (PLAIN, {40: b"\1"}, "blob_bytes at byte 40: wrong value: expected 256, found 257"),
    (PLAIN, {40: b"\xff" * 8}, "blob_bytes at byte 40: wrong value: expected 256, found 18446744073709551615"),
    (PLAIN, {55: b"\1"}, "reserved at byte 48: wrong value: expected 0, found 72057594037927936"),
    (PLAIN, {64: b"\1"}, "version spans at byte 64: wrong order or value: expected starts 0, ... increasing"),
    (PLAIN, {79: b"\x80"}, "versions below 2**63, each unlike the one before, found [[0, 9223372036854775808]]"),
    (TWO_SPANS, {88: b"\1"}, "found [[0, 1], [5, 1]]"),
    (TWO_SPANS, {80: b"\0"}, "found [[0, 1], [0, 2]]"),
    (TWO_SPANS, {80: b"\x0a"}, "increasing, below 10; versions below 2**63, each unlike the one before, found"),
    (PLAIN, {88: b"\6"}, "layer ids at byte 88: wrong order: expected increasing, found [6, 6]"),
    (PLAIN, {92: b"\3"}, "layer ids at byte 88: wrong order: expected increasing, found [4, 3]"),
    (PLAIN, {107: b"\x80"}, "token ids at byte 104: id out of range [token 2]: expected below 2**31, found 2147483655"),
    (PARTLY, {136: b"\xff\3"}, "coverage at byte 12: a smaller mode says the same: expected 0, found 1"),
    (PARTLY, {136: b"\xff\5"}, "coverage bitmap at byte 136: unused bits are set: expected zero bits"),
    (BY_LAYER, {136: b"\3\0" * 5}, "coverage at byte 12: a smaller mode says the same: expected 1, found 2"),
    (BY_LAYER, {136: b"\x43"}, "coverage bitmap at byte 136: unused bits are set: expected zero bits"),
    (PLAIN, {191: b"\1"}, "padding at byte 136: not empty: expected zero bytes"),
    (PLAIN, {192 + 13: b"\4"}, "payload at byte 192: id out of range [token 3]: expected below 4, found 4"),
    (PLAIN, {192 + 40: b"\1"}, "payload at byte 192: ids after the last token: expected zeros"),
    (PARTLY, {192 + 39: b"\1"}, "ids where nothing is covered [token 9]: expected zeros, found [[0, 0], [0, 1]]"),
    (BY_LAYER, {192 + 30: b"\3"}, "ids where nothing is covered [token 7]: expected zeros, found [3, 0]"),
    (PACKED, {192 + 38: b"\xff", 256 + 4: b"\x40"}, "id out of range [token 9]: expected below 300, found 511"),
    (PACKED, {256 + 7: b"\x80"}, "payload at byte 192: ids after the last token: expected zeros"),
]


@pytest.mark.parametrize(("trace", "changes", "message"), LIES, ids=[f"{i}: {lie[2]}" for i, lie in enumerate(LIES)])
def test_a_lie_under_good_checksums_is_refused(trace: RouteTrace, changes: dict[int, bytes], message: str) -> None:
    honest = trace.to_bytes()
    payload_at = min(192, len(honest))
    assert resealed(honest, len(trace.versions), payload_at) == honest
    with pytest.raises(TraceFormatError) as caught:
        decode_trace(resealed(patched(honest, changes), len(trace.versions), payload_at))
    assert message in str(caught.value)


def test_bits_that_no_id_needs_are_refused() -> None:
    forged = resealed(patched(PACKED.to_bytes(), {20: bytes(4)}), 1, 192)  # as if nobody knew of 300 experts
    with pytest.raises(TraceFormatError, match="id_bits at byte 11: fewer would do: expected 8, found 9"):
        decode_trace(forged)


@pytest.mark.parametrize("claimed", [2**24, 2**40, 2**62])
def test_a_claim_allocates_nothing(claimed: int) -> None:
    """Not even where all sizes in the header agree, and no limit stops it."""
    blob = patched(UNKNOWN.to_bytes(), {24: struct.pack("<Q", claimed)})
    blocks = claimed // 512
    size = -(-(64 + 16 + 8 * blocks + 4 * 2 + 4 * claimed) // 64) * 64 + 4 * claimed
    blob = resealed(patched(blob, {40: struct.pack("<Q", size % 2**64)}), 1, 192)
    tracemalloc.start()
    with pytest.raises(TraceFormatError) as caught:
        decode_trace(blob, limits=Limits(tokens=2**64, blob_bytes=2**80))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert caught.value.expected == (f"{size} bytes" if size < 2**64 else size)


# ---- the words of an error, limits, and what is not written ----------------------------------------------------------


def test_errors_say_what_is_wrong_and_where() -> None:
    blob = make_trace(600, 2, 2).to_bytes()
    size = len(blob)
    for harmed, message in (
        (b"", "header at byte 0: the blob is cut off: expected 64 bytes, found 0 bytes"),
        (b"{}", "magic at byte 0: not a route trace: expected 89 4d 52 54 0d 0a 1a 0a, found 7b 7d"),
        (blob[:63], "header at byte 0: the blob is cut off: expected 64 bytes, found 63 bytes"),
        (blob[:-1], f"blob_bytes at byte 40: the blob is cut off: expected {size} bytes, found {size - 1} bytes"),
        (blob + b"!", f"byte 40: bytes after the end of the blob: expected {size} bytes, found {size + 1} bytes"),
    ):
        with pytest.raises(TraceFormatError) as caught:
            decode_trace(harmed)
        assert message in str(caught.value)
    for position, message in (
        (16, r"header_crc at byte 60: corrupted: expected checksum \w{8}, found \w{8}$"),
        (70, r"sections_crc at byte 56: corrupted: expected checksum \w{8}, found \w{8}$"),
        (-1, r"payload at byte \d+: block 1 is corrupted \[token 512\]: expected checksum \w{16}, found \w{16}$"),
    ):
        harmed = bytearray(blob)
        harmed[position] ^= 255
        with pytest.raises(TraceFormatError, match=message):
            decode_trace(harmed)


@pytest.mark.parametrize("field", ["tokens", "layers", "top_k", "spans", "blob_bytes"])
def test_limits_hold_for_readers_and_writers(field: str) -> None:
    trace = make_trace(50, 3, 4, spans=3)
    blob = trace.to_bytes()
    exact = {"tokens": 50, "layers": 3, "top_k": 4, "spans": 3, "blob_bytes": len(blob)}
    assert decode_trace(blob, limits=Limits(**exact)) == trace
    tight = Limits(**exact | {field: exact[field] - 1})
    with pytest.raises(TraceFormatError, match=f"{field} at byte .*out of range.*found {exact[field]}"):
        decode_trace(blob, limits=tight)
    with pytest.raises(TraceFormatError, match=f"{field} at byte .*out of range.*found {exact[field]}"):
        encode_parts(trace, limits=tight)


def test_what_a_reader_would_refuse_is_not_written() -> None:
    for experts, num_experts in ((np.full((10, 2, 2), 700, np.uint16), 300), (np.full((10, 2, 2), 4, np.uint8), 4)):
        with pytest.raises(TraceFormatError, match=f"id out of range: expected below {num_experts}"):
            made_of(PLAIN, experts, num_experts, PLAIN.layers).to_bytes()
    with pytest.raises(TraceFormatError, match=r"layer ids at byte 88: id out of range: expected below 2\*\*32"):
        made_of(PLAIN, PLAIN.routed_experts, 4, (1, 2**32)).to_bytes()
    with pytest.raises(TraceFormatError, match=r"ids where nothing is covered \[token 9\]"):
        made_of(PARTLY, PLAIN.routed_experts, 4, PLAIN.layers).to_bytes()


def test_a_part_names_tokens_by_their_place_in_the_whole() -> None:
    covered = np.arange(700) != 600
    honest = RouteTrace([7] * 700, [[[0, 1]]] * 700, [4], covered, num_experts=4)
    blob = spec_encode(made_of(honest, np.full((700, 1, 2), 1, np.uint8), 4, (4,)))
    with pytest.raises(TraceFormatError, match=r"byte \d+: ids where nothing is covered \[token 600\]"):
        decode_trace(blob, slice(520, 690))
    harmed = np.zeros((700, 1, 2), np.uint8)
    harmed[650] = 5
    with pytest.raises(TraceFormatError, match=r"id out of range \[token 650\]: expected below 4, found 5"):
        decode_trace(spec_encode(made_of(honest, harmed, 4, (4,))), slice(520, 690))


def test_rows_are_left_to_be_checked_later() -> None:
    read = decode_trace(made_of(PLAIN, np.ones((10, 2, 2), np.uint8), 4, PLAIN.layers).to_bytes())
    with pytest.raises(TraceError, match="an expert occurs twice in one row"):
        read.check_rows()
