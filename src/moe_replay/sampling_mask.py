"""`SamplingMask`: the tokens that top-k and top-p left to sample from, for each token of a sequence.

The trainer scores a token over the same support (`LogitMask`): over the whole vocabulary, old and rollout log-probs of
the same weights would differ by the probability that was cut off.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moe_replay.errors import AlignmentError, EngineError, TraceFormatError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_VOCAB_SIZE = 2**24


class SamplingMask:
    """Support of each of T tokens, in a vocabulary of V. Arrays are read-only.

    vocab_size   V
    counts       (T,) int64: size of the support; 0: the whole vocabulary
    token_ids    (sum of counts,) int32: the supports one after another, each in increasing order
    """

    __slots__ = ("counts", "token_ids", "vocab_size")

    def __init__(
        self, vocab_size: int, counts: np.ndarray, token_ids: np.ndarray, *, sample: int | str | None = None
    ) -> None:
        """Check and keep the arrays; a support of the whole vocabulary gets the count 0.

        sample   for errors
        """
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise EngineError(
                "a sampling mask of an impossible vocabulary", expected=f"1 to {MAX_VOCAB_SIZE}", found=vocab_size
            )
        counts, ids = np.asarray(counts, np.int64), np.asarray(token_ids)
        if counts.ndim != 1 or counts.min(initial=0) < 0 or int(counts.sum()) != len(ids):
            raise EngineError(
                "the supports of a sampling mask do not add up",
                sample=sample,
                expected=f"{len(ids)} ids, as listed",
                found=f"{int(counts.sum())} ids counted for {len(counts)} tokens",
            )
        _check_ids(vocab_size, counts, ids, sample)
        whole = counts == vocab_size
        if whole.any():
            ids = ids[~np.repeat(whole, counts)]
            counts = np.where(whole, 0, counts)
        self.vocab_size = vocab_size
        self.counts = _read_only(counts.copy())
        self.token_ids = _read_only(ids.astype(np.int32))

    @classmethod
    def whole(cls, num_tokens: int, vocab_size: int) -> SamplingMask:
        """Return the mask of tokens that nothing was cut off for."""
        return cls(vocab_size, np.zeros(num_tokens, np.int64), np.zeros(0, np.int32))

    @classmethod
    def of_lists(
        cls, supports: Sequence[Sequence[int]], vocab_size: int, *, sample: int | str | None = None
    ) -> SamplingMask:
        """Return the mask of supports listed in any order; an empty one is an error."""
        counts = np.fromiter(map(len, supports), np.int64, len(supports))
        if not counts.all():
            raise EngineError(
                "a token with an empty support", sample=sample, token=int(np.argmin(counts)), expected="at least one id"
            )
        ids = np.fromiter(chain.from_iterable(supports), np.int64, int(counts.sum()))
        rows = np.repeat(np.arange(len(counts)), counts)
        if len(ids) and not _is_increasing(rows, ids).all():
            ids = ids[np.lexsort((ids, rows))]
        return cls(vocab_size, counts, ids, sample=sample)

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SamplingMask)
            and self.vocab_size == other.vocab_size
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self.token_ids, other.token_ids)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"SamplingMask({len(self)} tokens, {len(self.token_ids)} ids, vocabulary of {self.vocab_size})"

    @property
    def offsets(self) -> np.ndarray:
        """(T + 1,) int64: where the support of each token starts in `token_ids`, and the end."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def sizes(self) -> np.ndarray:
        """(T,) int64: size of each support, V where nothing was cut off."""
        return np.where(self.counts == 0, self.vocab_size, self.counts)

    def take(self, tokens: np.ndarray) -> SamplingMask:
        """Return the mask of these tokens (n,), in their order."""
        counts = self.counts[tokens]
        ends = np.cumsum(counts)
        position = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        ids = self.token_ids[np.repeat(self.offsets[:-1][tokens], counts) + position]
        return SamplingMask(self.vocab_size, counts, ids)

    @classmethod
    def concatenate(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Return the mask of the tokens of all masks, of which there is at least one."""
        sizes = {mask.vocab_size for mask in masks}
        if len(sizes) != 1:
            raise EngineError("sampling masks of several vocabularies in one sequence", found=sorted(sizes))
        counts = np.concatenate([mask.counts for mask in masks])
        return cls(sizes.pop(), counts, np.concatenate([mask.token_ids for mask in masks]))

    def check_sampled(self, sampled: np.ndarray, *, sample: int | str | None = None) -> None:
        """Raise unless each of the sampled tokens (T,) is in its own support."""
        if len(sampled) != len(self):
            raise EngineError(
                "a sampling mask needs one support per sampled token",
                sample=sample,
                expected=f"{len(sampled)} tokens",
                found=f"{len(self)} tokens",
            )
        rows = np.repeat(np.arange(len(self)), self.counts)
        inside = self.counts == 0
        inside[rows[self.token_ids == np.asarray(sampled)[rows]]] = True
        if not inside.all():
            token = int(np.argmin(inside))
            raise EngineError(
                "a sampled token is not in its own support",
                sample=sample,
                token=token,
                expected=f"one of {int(self.counts[token])} ids",
                found=f"token id {int(sampled[token])} ({int((~inside).sum())} such tokens)",
                remedy="The engine returned the mask of other tokens, or sampled from another distribution",
            )


def _check_ids(vocab_size: int, counts: np.ndarray, ids: np.ndarray, sample: int | str | None) -> None:
    rows = np.repeat(np.arange(len(counts)), counts)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        raise EngineError(
            "a sampling mask has an id outside of the vocabulary",
            sample=sample,
            token=int(rows[outside[0]]),
            expected=f"0 <= id < {vocab_size}",
            found=int(ids[outside[0]]),
        )
    unordered = np.flatnonzero(~_is_increasing(rows, ids))
    if unordered.size:
        raise EngineError(
            "the ids of a support must increase, each once",
            sample=sample,
            token=int(rows[unordered[0] + 1]),
            found=f"{int(ids[unordered[0]])} before {int(ids[unordered[0] + 1])}",
        )


def _is_increasing(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """(n - 1,) bool: whether an id is followed by a larger one, or by that of another token."""
    return (ids[1:] > ids[:-1]) | (rows[1:] != rows[:-1])


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


# ---- on a device -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LogitMask:
    """A sampling mask of n tokens on a device, which leaves out logits. No method waits for the device."""

    vocab_size: int  # of the engine that sampled
    offsets: np.ndarray  # (n + 1,) where the support of each starts in `rows` and `columns`; on the host
    rows: Tensor  # (ids of all supports,) int32: the position that an id belongs to
    columns: Tensor  # (ids of all supports,) int32: the id
    is_whole: Tensor  # (n,) bool: nothing was cut off

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> LogitMask:
        from moe_replay.utils.device import to_device

        rows = np.repeat(np.arange(len(mask), dtype=np.int32), mask.counts)
        return cls(
            mask.vocab_size,
            mask.offsets,
            to_device(rows, device),
            to_device(mask.token_ids, device),
            to_device(mask.counts == 0, device),
        )

    def check_vocabulary(self, width: int) -> None:
        """Raise unless the engine has the vocabulary of the policy, whose head has `width` rows on all ranks.

        Where nothing was cut off, the policy normalizes over all rows of its head: they must be those of the engine.
        """
        if self.vocab_size != width:
            raise AlignmentError(
                "a sampling mask of another vocabulary than the policy's",
                expected=f"{width} tokens",
                found=f"{self.vocab_size} tokens",
                remedy="Engine and trainer must have the same model",
            )

    def apply_(self, logits: Tensor, part: slice, first: int) -> Tensor:
        """Set the logits (rows of the slice, width) that do not count to minus infinity; return which, as bool."""
        dropped = self.dropped(part, first, logits.shape[1])
        logits.masked_fill_(dropped, -math.inf)
        return dropped

    def dropped(self, part: slice, first: int, width: int) -> Tensor:
        """(rows of the slice, width) bool: logits that do not count, of the ids from `first` on."""
        stop = min(part.stop, len(self.offsets) - 1)
        begin, end = self.offsets[part.start], self.offsets[stop]
        columns = self.columns[begin:end].long() - first
        # Ids of other ranks go to a column that is cut off: to select those of this one would wait for the device.
        columns = columns.where((columns >= 0) & (columns < width), width)
        dropped = (~self.is_whole[part])[:, None].repeat(1, width + 1)
        dropped[self.rows[begin:end].long() - part.start, columns] = False
        return dropped[:, :width]


# ---- as bytes --------------------------------------------------------------------------------------------------------
#
# docs/trace-format.md#sampling-mask has the format, with the names used here. Reading trusts nothing: sizes are
# compared with the bytes that exist before anything is allocated, every byte is under a checksum, and bytes that the
# one canonical writer would not have written are a `TraceFormatError`.

MAGIC = b"\x89MRM\r\n\x1a\n"
VERSION = 1
HEADER_BYTES = 56
_HEADER = struct.Struct("<8sHHIQQIIQII")
_BIT_SETS_AT_ONCE = 256  # each is a byte per id of the vocabulary while it is written or read


@dataclass(frozen=True)
class MaskLimits:
    """Upper bounds on what is read from a header."""

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
    sizes_found = (int(counts[~as_bits].sum()), int(as_bits.sum()))
    if sizes_found != (shape.listed, shape.bit_sets):
        raise _error("counts", "do not add up", sample, f"{shape.listed} ids, {shape.bit_sets} bit sets", sizes_found)
    ids = np.empty(int(counts.sum()), np.int32)
    in_bits = np.repeat(as_bits, counts)
    ids[~in_bits] = _unpack(np.frombuffer(ids_at, np.uint8), shape.listed, shape.id_bits, sample)
    ids[in_bits] = _ids_of_bit_sets(np.frombuffer(bits_at, np.uint8), counts[as_bits], shape.vocab_size, sample)
    try:
        return SamplingMask(shape.vocab_size, counts, ids, sample=sample)
    except EngineError as error:
        raise TraceFormatError(f"sampling mask: {error.problem}", sample=sample, token=error.token) from error


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
        block = counts[first : first + _BIT_SETS_AT_ONCE]
        kept = np.zeros((len(block), vocab_size), np.uint8)
        kept[np.repeat(np.arange(len(block)), block), ids[ends[first] : ends[first + len(block)]]] = 1
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
