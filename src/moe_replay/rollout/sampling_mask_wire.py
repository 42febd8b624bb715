"""Sampling masks as bytes; the format, with the names used here, is docs/trace-format.md#sampling-mask.

Reading trusts nothing: sizes are compared with the bytes that exist before anything is allocated, every byte is under
a checksum, and whatever the one canonical writer would not have written is a `TraceFormatError`.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from moe_replay.errors import EngineError, TraceFormatError
from moe_replay.rollout.sampling_mask import MAX_VOCAB_SIZE, SamplingMask

MAGIC = b"\x89MRM\r\n\x1a\n"
VERSION = 1
HEADER_BYTES = 56
_HEADER = struct.Struct("<8sHHIQQIIQII")
_BIT_SETS_AT_ONCE = 256  # each is a byte per id of the vocabulary while it is written or read


@dataclass(frozen=True)
class MaskLimits:
    """Upper bounds on what is read, whatever a header claims."""

    tokens: int = 2**24
    vocab_size: int = MAX_VOCAB_SIZE
    blob_bytes: int = 2**34


DEFAULT_LIMITS = MaskLimits()


class _Shape(NamedTuple):
    """The sizes in a header."""

    vocab_size: int
    tokens: int
    listed: int  # ids in lists
    bit_sets: int

    @property
    def id_bits(self) -> int:
        return max(1, (self.vocab_size - 1).bit_length())

    @property
    def section_bytes(self) -> tuple[int, int, int]:
        """Sizes of counts, listed ids and bit sets."""
        whole_bytes, more_bits = divmod(self.id_bits, 8)
        ids = whole_bytes * self.listed + more_bits * -(-self.listed // 8)
        return 4 * self.tokens, ids, self.bit_sets * -(-self.vocab_size // 8)

    @property
    def blob_bytes(self) -> int:
        return HEADER_BYTES + sum(self.section_bytes)

    def is_bit_set(self, counts: np.ndarray) -> np.ndarray:
        """(T,) bool: supports that take fewer bits as a bit set than as a list."""
        return counts * self.id_bits > self.vocab_size


def mask_to_bytes(mask: SamplingMask) -> bytes:
    """Encode a sampling mask."""
    shape = _Shape(mask.vocab_size, len(mask), 0, 0)
    as_bits = shape.is_bit_set(mask.counts)
    in_bits = np.repeat(as_bits, mask.counts)
    shape = shape._replace(listed=int((~in_bits).sum()), bit_sets=int(as_bits.sum()))
    body = b"".join(
        [
            mask.counts.astype("<u4").tobytes(),
            _pack(mask.token_ids[~in_bits].astype(np.uint32), shape.id_bits),
            *_bit_sets(mask.counts[as_bits], mask.token_ids[in_bits], mask.vocab_size),
        ]
    )
    fields = (MAGIC, VERSION, 0, *shape[:1], shape.tokens, shape.listed, shape.bit_sets, 0, shape.blob_bytes)
    head = _HEADER.pack(*fields, zlib.crc32(body), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + body


def mask_from_bytes(
    data: bytes | bytearray | memoryview, *, sample: int | None = None, limits: MaskLimits = DEFAULT_LIMITS
) -> SamplingMask:
    """Decode a sampling mask; `sample` is for errors."""
    view = memoryview(data).cast("B")
    shape = _read_header(view, sample, limits)
    sizes = shape.section_bytes
    ends = np.cumsum([HEADER_BYTES, *sizes]).tolist()
    counts_at, ids_at, bits_at = (view[start:stop] for start, stop in pairwise(ends))
    counts = np.frombuffer(counts_at, "<u4").astype(np.int64)
    as_bits = shape.is_bit_set(counts)
    if counts.max(initial=0) >= shape.vocab_size:
        raise _error("counts", "a support as large as the vocabulary is written as 0", sample)
    found = (int(counts[~as_bits].sum()), int(as_bits.sum()))
    if found != (shape.listed, shape.bit_sets):
        raise _error("counts", "do not add up", sample, f"{shape.listed} ids, {shape.bit_sets} bit sets", found)
    ids = np.empty(int(counts.sum()), np.int32)
    in_bits = np.repeat(as_bits, counts)
    ids[~in_bits] = _unpack(np.frombuffer(ids_at, np.uint8), shape.listed, shape.id_bits, sample)
    ids[in_bits] = _ids_of_bit_sets(np.frombuffer(bits_at, np.uint8), counts[as_bits], shape.vocab_size, sample)
    try:
        return SamplingMask(shape.vocab_size, counts, ids, sample=sample)
    except EngineError as wrong:
        raise TraceFormatError(f"sampling mask: {wrong.problem}", sample=sample, token=wrong.token) from wrong


def _read_header(view: memoryview, sample: int | None, limits: MaskLimits) -> _Shape:
    if len(view) < HEADER_BYTES:
        raise _error("header", "truncated", sample, f"at least {HEADER_BYTES} bytes", len(view))
    magic, version, flags, *sizes, reserved, blob_bytes, body_crc, header_crc = _HEADER.unpack(view[:HEADER_BYTES])
    if magic != MAGIC:
        raise _error("magic", "not a sampling mask", sample, MAGIC, magic)
    if zlib.crc32(view[: HEADER_BYTES - 4]) != header_crc:
        raise _error("header_crc", "the header is corrupted", sample)
    if version != VERSION:
        raise _error("version", "of another release", sample, VERSION, version)
    if flags or reserved:
        raise _error("reserved", "must be 0", sample, 0, flags or reserved)
    shape = _Shape(*sizes)
    for name, value, limit in (
        ("vocab_size", shape.vocab_size, limits.vocab_size),
        ("num_tokens", shape.tokens, limits.tokens),
        ("blob_bytes", blob_bytes, limits.blob_bytes),
    ):
        if value > limit:
            raise _error(name, "above the limit", sample, f"at most {limit}", value)
    if not shape.vocab_size:
        raise _error("vocab_size", "must not be 0", sample)
    if not blob_bytes == shape.blob_bytes == len(view):
        raise _error("blob_bytes", "another size", sample, shape.blob_bytes, f"{blob_bytes}, {len(view)} bytes present")
    if zlib.crc32(view[HEADER_BYTES:]) != body_crc:
        raise _error("body_crc", "corrupted", sample)
    return shape


def _error(field: str, problem: str, sample: int | None, expected: object = None, found: object = None) -> Exception:
    return TraceFormatError(f"sampling mask, {field}: {problem}", sample=sample, expected=expected, found=found)


# ---- lists ----------------------------------------------------------------------------------------------------------


def _pack(ids: np.ndarray, id_bits: int) -> bytes:
    """Return the byte planes of ids (n,) uint32, then their bit planes."""
    whole_bytes = id_bits // 8
    planes = [(ids >> (8 * byte)).astype(np.uint8) for byte in range(whole_bytes)]
    planes += [
        np.packbits((ids >> bit).astype(np.uint8) & 1, bitorder="little") for bit in range(8 * whole_bytes, id_bits)
    ]
    return b"".join(plane.tobytes() for plane in planes)


def _unpack(planes: np.ndarray, num_ids: int, id_bits: int, sample: int | None) -> np.ndarray:
    whole_bytes, more_bits = divmod(id_bits, 8)
    ids = np.zeros(num_ids, np.uint32)
    for byte in range(whole_bytes):
        ids |= planes[byte * num_ids : (byte + 1) * num_ids].astype(np.uint32) << np.uint32(8 * byte)
    for bit, plane in enumerate(planes[whole_bytes * num_ids :].reshape(more_bits, -(-num_ids // 8))):
        bits = np.unpackbits(plane, bitorder="little")
        if bits[num_ids:].any():
            raise _error("ids", "unused bits must be 0", sample)
        ids |= bits[:num_ids].astype(np.uint32) << np.uint32(8 * whole_bytes + bit)
    return ids


# ---- bit sets -------------------------------------------------------------------------------------------------------


def _bit_sets(counts: np.ndarray, ids: np.ndarray, vocab_size: int) -> list[bytes]:
    ends = np.concatenate([[0], np.cumsum(counts)])
    packed = []
    for first in range(0, len(counts), _BIT_SETS_AT_ONCE):
        some = counts[first : first + _BIT_SETS_AT_ONCE]
        kept = np.zeros((len(some), vocab_size), np.uint8)
        kept[np.repeat(np.arange(len(some)), some), ids[ends[first] : ends[first + len(some)]]] = 1
        packed.append(np.packbits(kept, axis=1, bitorder="little").tobytes())
    return packed


def _ids_of_bit_sets(packed: np.ndarray, counts: np.ndarray, vocab_size: int, sample: int | None) -> np.ndarray:
    rows = packed.reshape(len(counts), -(-vocab_size // 8))
    parts = [np.zeros(0, np.int64)]
    for first in range(0, len(counts), _BIT_SETS_AT_ONCE):
        bits = np.unpackbits(rows[first : first + _BIT_SETS_AT_ONCE], axis=1, bitorder="little")
        if bits[:, vocab_size:].any():
            raise _error("bit sets", "unused bits must be 0", sample)
        if not np.array_equal(bits.sum(axis=1, dtype=np.int64), counts[first : first + len(bits)]):
            raise _error("bit sets", "other numbers of bits than counted", sample)
        parts.append(np.nonzero(bits)[1])
    return np.concatenate(parts)
