"""Encode the parts of a trace as bytes, and decode them. The format, with the names used here, is docs/trace-format.md.

Reading trusts nothing: sizes are compared with the bytes that exist before anything is allocated, every byte is under
a checksum, and anything that the one canonical writer would not have written is a `TraceFormatError`.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from moe_replay.errors import TraceFormatError
from moe_replay.routes.trace_parts import MAX_EXPERTS, TraceParts, VersionSpan, cut_spans

# ---- ids of more than a byte as planes -------------------------------------------------------------------------------
# All low bytes, then the remaining bits, one plane each. Both directions are bound by memory, not by arithmetic: each
# pass over a block costs about as much as any other.

ID_GROUP = 64  # ids are padded to a multiple of this, so that every plane is a whole number of 64-bit words
_BIT_8_OF_EIGHT_IDS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * np.uint16(256)


def smallest_id_bits(num_ids: int) -> int:
    """Return the bits of an id on the wire, at least 8."""
    return max(8, (num_ids - 1).bit_length())


def pack_ids(ids: np.ndarray, id_bits: int, out: np.ndarray) -> None:
    """Pack ids (n,) uint16, all below 2**id_bits, into out (n / 8 * id_bits,) uint8; n is a multiple of `ID_GROUP`."""
    np.copyto(out[: len(ids)], ids, casting="unsafe")  # keeps the low byte
    planes = out[len(ids) :].reshape(id_bits - 8, -1)
    for bit in range(id_bits - 1, 7, -1):  # from the top, where a comparison finds the bit
        planes[bit - 8] = np.packbits(ids >= (1 << bit), bitorder="little")
        if bit > 8:
            ids = ids & ((1 << bit) - 1)


def unpack_ids(block: np.ndarray, id_bits: int, out: np.ndarray) -> None:
    """Invert `pack_ids`, into out (n,) uint16."""
    eights = out.reshape(-1, 8)
    planes = block[len(out) :].reshape(id_bits - 8, -1)
    np.take(_BIT_8_OF_EIGHT_IDS, planes[0], axis=0, out=eights, mode="clip")  # "clip": "raise" would buffer
    for more, plane in enumerate(planes[1:], 1):
        eights |= np.take(_BIT_8_OF_EIGHT_IDS << more, plane, axis=0)
    out |= block[: len(out)]


# ---- sizes and offsets -----------------------------------------------------------------------------------------------

MAGIC = b"\x89MRT\r\n\x1a\n"
VERSION = 1
BLOCK_TOKENS = 512
HEADER_BYTES = 64

_HEADER = struct.Struct("<8sHBBBBHIIQIIQQII")
_CODEC_PLANES = 1
_ALL, _PER_TOKEN, _PER_TOKEN_AND_LAYER = range(3)  # coverage
_DIGEST_ROW = 512  # words


@dataclass(frozen=True)
class Limits:
    """Upper bounds on reads and writes, regardless of a header's claims."""

    tokens: int = 2**24
    layers: int = 4096
    top_k: int = 1024
    spans: int = 2**16
    blob_bytes: int = 2**36


DEFAULT_LIMITS = Limits()


class Offsets(NamedTuple):
    """Byte offsets of the parts of a blob."""

    spans: int
    digests: int
    layers: int
    token_ids: int
    bitmap: int
    padding: int
    payload: int


@dataclass(frozen=True)
class Shape:
    """The sizes in a header, and the byte offsets that follow from them."""

    tokens: int
    layers: int
    top_k: int
    num_experts: int  # 0: unknown
    id_bits: int
    coverage: int
    spans: int

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS)

    @cached_property
    def offsets(self) -> Offsets:
        bitmap = (0, -(-self.tokens // 8), self.tokens * -(-self.layers // 8))[self.coverage]
        sizes = (HEADER_BYTES, 16 * self.spans, 8 * self.blocks, 4 * self.layers, 4 * self.tokens, bitmap)
        *begins, end = accumulate(sizes)
        return Offsets(*begins, padding=end, payload=-(-end // 64) * 64)

    @property
    def blob_bytes(self) -> int:
        return self.block_at(self.blocks)

    def block_at(self, block: int) -> int:
        """Return the offset of a block; for the number of blocks, the end of the last one."""
        ids = min(block * BLOCK_TOKENS, self.tokens) * self.layers * self.top_k
        return self.offsets.payload + -(-ids // ID_GROUP) * (ID_GROUP // 8) * self.id_bits


class BlobSource:
    """The bytes of a blob: a read-only buffer here, a file in a subclass."""

    prefix: str = ""  # of an error's text
    start: int = 0  # of the blob in what holds it
    sample: int | None = None

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def take(self, start: int, stop: int) -> memoryview:
        """Return these bytes of the blob; no others are read."""
        return self._view[start:stop]

    def error(
        self, field: str, at: int, problem: str, expected: object, found: object, token: int | None = None
    ) -> TraceFormatError:
        text = f"{self.prefix}{field} at byte {self.start + at}: {problem}"
        return TraceFormatError(text, sample=self.sample, token=token, expected=expected, found=found)


# ---- writing --------------------------------------------------------------------------------------------------------


def encode(trace: TraceParts, limits: Limits = DEFAULT_LIMITS) -> list[memoryview]:
    """Encode a trace as buffers for vectored writes. Up to 256 experts, ids are views of the trace and not copied."""
    mode, bitmap = _coverage_bitmap(trace.coverage)
    num_experts = trace.num_experts or 0
    id_bits = smallest_id_bits(num_experts or int(trace.routed_experts.max(initial=0)) + 1)
    shape = Shape(
        len(trace.token_ids),
        len(trace.layers),
        trace.routed_experts.shape[2],
        num_experts,
        id_bits,
        mode,
        len(trace.versions),
    )
    unwritten = BlobSource(memoryview(b""))
    _check_shape(unwritten, shape, limits)
    if trace.layers[-1] >= 2**32:
        raise unwritten.error("layer ids", shape.offsets.layers, "id out of range", "below 2**32", trace.layers[-1])
    _check_uncovered(unwritten, shape, trace.routed_experts, trace.coverage, 0)
    blocks, digests = [], []
    packed = np.empty(0 if id_bits == 8 else shape.blob_bytes - shape.offsets.payload, np.uint8)
    for block in range(shape.blocks):
        ids = trace.routed_experts[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].reshape(-1)
        limit = num_experts or MAX_EXPERTS
        if limit <= np.iinfo(ids.dtype).max and (largest := int(ids.max())) >= limit:  # bits would be lost silently
            raise unwritten.error("payload", shape.offsets.payload, "id out of range", f"below {limit}", largest)
        if len(ids) % ID_GROUP:
            ids = np.pad(ids, (0, -len(ids) % ID_GROUP))
        if id_bits == 8:
            blocks.append(ids.astype(np.uint8, copy=False))
        else:
            at = shape.block_at(block) - shape.offsets.payload
            blocks.append(packed[at : at + len(ids) // 8 * id_bits])
            pack_ids(ids.astype(np.uint16, copy=False), id_bits, blocks[-1])
        digests.append(block_digest(blocks[-1]))  # while it is in cache
    numbers = ((trace.versions, "<u8"), (digests, "<u8"), (trace.layers, "<u4"), (trace.token_ids, "<u4"))
    padding = bytes(shape.offsets.payload - shape.offsets.padding)
    sections = b"".join([*(np.asarray(values, dtype).tobytes() for values, dtype in numbers), bitmap, padding])
    fields = (MAGIC, VERSION, _CODEC_PLANES, id_bits, mode, 0, shape.top_k, shape.layers, num_experts)
    sizes = (shape.tokens, shape.spans, 0, shape.blob_bytes, 0, zlib.crc32(sections))
    header = _HEADER.pack(*fields, *sizes, 0)[:-4]
    head = header + struct.pack("<I", zlib.crc32(header)) + sections
    return [memoryview(head), *(block.data for block in blocks)]


def block_digest(block: np.ndarray) -> int:
    """Checksum of a block of whole words: CRC-32 of the row sums, and above it that of the column sums."""
    words = block.view("<u8")
    rows = np.add.reduceat(words, np.arange(0, len(words), _DIGEST_ROW))
    whole = len(words) - len(words) % _DIGEST_ROW
    columns = np.add.reduce(words[:whole].reshape(-1, _DIGEST_ROW), axis=0)
    columns[: len(words) - whole] += words[whole:]
    return zlib.crc32(rows.astype("<u8", copy=False).data) | zlib.crc32(columns.astype("<u8", copy=False).data) << 32


def _coverage_bitmap(covered: np.ndarray) -> tuple[int, bytes]:
    """Return the smallest mode that can encode which (token, layer) are covered, and its bits."""
    if covered.all():
        return _ALL, b""
    if (covered == covered[:, :1]).all():
        return _PER_TOKEN, np.packbits(covered[:, 0], bitorder="little").tobytes()
    return _PER_TOKEN_AND_LAYER, np.packbits(covered, axis=1, bitorder="little").tobytes()


# ---- reading --------------------------------------------------------------------------------------------------------


def buffer_source(data: bytes | bytearray | memoryview) -> BlobSource:
    """Return the source of a blob in memory: a read-only, aligned buffer is viewed, any other copied."""
    view = memoryview(data).cast("B")
    if not view.readonly or np.frombuffer(view, np.uint8).ctypes.data % 8:  # only aligned words can be viewed
        view = memoryview(bytes(view))
    return BlobSource(view)


def decode(source: BlobSource, tokens: slice, limits: Limits) -> tuple[TraceParts, slice]:
    """Read the blocks of a blob that hold the chosen tokens; the second value selects the tokens among those read.

    Every byte that is used is verified; rows are not checked for duplicate experts.
    """
    shape, sections_crc = read_header(source, limits)
    if len(source) != shape.blob_bytes:
        problem = "the blob is cut off" if len(source) < shape.blob_bytes else "bytes after the end of the blob"
        raise source.error("blob_bytes", 40, problem, f"{shape.blob_bytes} bytes", f"{len(source)} bytes")
    sections = _read_sections(source, shape, sections_crc)
    start, stop, step = tokens.indices(shape.tokens)
    start, stop = max(start, 0), max(start, stop, 0)
    blocks = range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS))
    first, last = (min(block * BLOCK_TOKENS, shape.tokens) for block in (blocks.start, blocks.stop))
    covered = sections.covered[first:last]
    ids = _read_ids(source, shape, sections.digests, blocks)
    routed_experts = ids[: (last - first) * shape.layers * shape.top_k].reshape(last - first, shape.layers, shape.top_k)
    _check_uncovered(source, shape, routed_experts, covered, first)
    versions = cut_spans(sections.versions, first, last)
    token_ids = sections.token_ids[first:last]
    parts = TraceParts(token_ids, routed_experts, sections.layers, covered, versions, shape.num_experts or None)
    return parts, slice(start - first, stop - first, step)


def decode_token_ids(data: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> np.ndarray:
    """(T,) int32: the tokens of a blob, without reading its routes."""
    source = buffer_source(data)
    return _read_sections(source, *read_header(source, limits)).token_ids


def read_header(source: BlobSource, limits: Limits) -> tuple[Shape, int]:
    """Return the sizes and the checksum of the sections; the bytes that should follow are not read yet."""
    raw = bytes(source.take(0, min(HEADER_BYTES, len(source))))
    if raw[:8] != MAGIC[: len(raw)]:
        raise source.error("magic", 0, "not a route trace", MAGIC.hex(" "), raw[:8].hex(" "))
    if len(raw) < HEADER_BYTES:
        raise source.error("header", 0, "the blob is cut off", f"{HEADER_BYTES} bytes", f"{len(raw)} bytes")
    _, version, codec, id_bits, coverage, flags, top_k, num_layers, num_experts, *more = _HEADER.unpack(raw)
    num_tokens, num_spans, reserved, blob_bytes, reserved_too, sections_crc, header_crc = more
    if version != VERSION:
        raise source.error("version", 8, "another format version", VERSION, version)
    _check_crc(source, "header_crc", 60, raw[:60], header_crc)
    shape = Shape(num_tokens, num_layers, top_k, num_experts, id_bits, coverage, num_spans)
    _check_shape(source, shape, limits)
    for field, at, expected, actual in (
        ("codec", 10, _CODEC_PLANES, codec),
        ("flags", 13, 0, flags),
        ("reserved", 36, 0, reserved),
        ("blob_bytes", 40, shape.blob_bytes, blob_bytes),
        ("reserved", 48, 0, reserved_too),
    ):
        if actual != expected:
            raise source.error(field, at, "wrong value", expected, actual)
    return shape, sections_crc


def _check_shape(source: BlobSource, shape: Shape, limits: Limits) -> None:
    least_bits = smallest_id_bits(shape.num_experts or 1)
    most_bits = least_bits if shape.num_experts else smallest_id_bits(MAX_EXPERTS)
    for field, at, least, most, actual in (
        ("num_experts", 20, 0, MAX_EXPERTS, shape.num_experts),
        ("id_bits", 11, least_bits, most_bits, shape.id_bits),
        ("coverage", 12, _ALL, _PER_TOKEN_AND_LAYER if shape.tokens else _ALL, shape.coverage),
        ("top_k", 14, 1, min(limits.top_k, shape.num_experts or MAX_EXPERTS), shape.top_k),
        ("num_layers", 16, 1, limits.layers, shape.layers),
        ("num_tokens", 24, 0, limits.tokens, shape.tokens),
        ("num_spans", 32, 1, min(limits.spans, max(shape.tokens, 1)), shape.spans),
    ):
        if not least <= actual <= most:
            raise source.error(field, at, "out of range", f"{least} to {most}", actual)
    if shape.blob_bytes > limits.blob_bytes:
        raise source.error("blob_bytes", 40, "out of range", f"at most {limits.blob_bytes}", shape.blob_bytes)


class _Sections(NamedTuple):
    versions: tuple[VersionSpan, ...]
    digests: list[int]  # B of them
    layers: tuple[int, ...]
    token_ids: np.ndarray  # (T,) int32
    covered: np.ndarray  # (T, 1) or (T, L) bool


def _read_sections(source: BlobSource, shape: Shape, crc: int) -> _Sections:
    """Read and check everything but header and payload."""
    offsets = shape.offsets
    raw = source.take(offsets.spans, offsets.payload)
    _check_crc(source, "sections_crc", 56, raw, crc)

    def array(dtype: str, start: int, stop: int) -> np.ndarray:
        return np.frombuffer(raw[start - offsets.spans : stop - offsets.spans], dtype)

    spans = array("<u8", offsets.spans, offsets.digests).reshape(-1, 2)
    starts, versions = spans.T
    starts_fit = starts[0] == 0 and (starts[1:] > starts[:-1]).all() and int(starts[-1]) < max(shape.tokens, 1)
    if not starts_fit or (versions[1:] == versions[:-1]).any() or int(versions.max()) >= 2**63:
        rule = f"starts 0, ... increasing, below {shape.tokens}; versions below 2**63, each unlike the one before"
        raise source.error("version spans", offsets.spans, "wrong order or value", rule, spans[:8].tolist())
    layers = array("<u4", offsets.layers, offsets.token_ids)
    if (layers[1:] <= layers[:-1]).any():
        raise source.error("layer ids", offsets.layers, "wrong order", "increasing", layers[:8].tolist())
    token_ids = array("<i4", offsets.token_ids, offsets.bitmap)
    if token_ids.min(initial=0) < 0:
        token = int(np.argmax(token_ids < 0))
        at, token_id = offsets.token_ids + 4 * token, int(token_ids[token]) + 2**32
        raise source.error("token ids", at, "id out of range", "below 2**31", token_id, token)
    if array("u1", offsets.padding, offsets.payload).any():
        raise source.error("padding", offsets.padding, "not empty", "zero bytes", "others")
    return _Sections(
        tuple(VersionSpan(*span) for span in spans.tolist()),
        array("<u8", offsets.digests, offsets.layers).tolist(),
        tuple(layers.tolist()),
        token_ids.astype(np.int32, copy=False),
        _read_coverage(source, shape, array("u1", offsets.bitmap, offsets.padding)),
    )


def _read_coverage(source: BlobSource, shape: Shape, bitmap: np.ndarray) -> np.ndarray:
    """(T, 1) or (T, L) bool."""
    if shape.coverage == _ALL:
        return np.ones((shape.tokens, 1), bool)
    per_token = shape.coverage == _PER_TOKEN
    bits = np.unpackbits(bitmap.reshape(1 if per_token else shape.tokens, -1), axis=1, bitorder="little")
    used, unused = np.split(bits, [shape.tokens if per_token else shape.layers], axis=1)
    if unused.any():
        raise source.error("coverage bitmap", shape.offsets.bitmap, "unused bits are set", "zero bits", "others")
    covered = used.reshape(shape.tokens, -1).view(bool)
    smallest, _ = _coverage_bitmap(covered)
    if smallest != shape.coverage:
        raise source.error("coverage", 12, "a smaller mode says the same", smallest, shape.coverage)
    return covered


def _read_ids(source: BlobSource, shape: Shape, digests: list[int], blocks: range) -> np.ndarray:
    """The ids of some blocks with the zeros that fill the last one; uint8 without a copy, or uint16."""
    start, stop = shape.block_at(blocks.start), shape.block_at(blocks.stop)
    payload = np.frombuffer(source.take(start, stop), np.uint8)
    ids = payload if shape.id_bits == 8 else np.empty(len(payload) // shape.id_bits * 8, np.uint16)
    row_ids = shape.layers * shape.top_k
    limit = shape.num_experts or MAX_EXPERTS
    largest, largest_matters = 0, shape.num_experts < 1 << shape.id_bits  # else no id of `id_bits` bits is too large
    for block in blocks:  # each is checked and unpacked while it is in cache
        at = shape.block_at(block)
        raw = payload[at - start : shape.block_at(block + 1) - start]
        digest = block_digest(raw)
        if digest != digests[block]:
            problem, expected = f"block {block} is corrupted", f"checksum {digests[block]:016x}"
            raise source.error("payload", at, problem, expected, f"{digest:016x}", block * BLOCK_TOKENS)
        block_ids = ids[(block - blocks.start) * BLOCK_TOKENS * row_ids :][: len(raw) // shape.id_bits * 8]
        if shape.id_bits > 8:
            unpack_ids(raw, shape.id_bits, block_ids)
        largest = max(largest, int(block_ids.max())) if largest_matters else 0
        if largest >= limit:
            token = block * BLOCK_TOKENS + int(np.argmax(block_ids >= limit)) // row_ids
            raise source.error("payload", at, "id out of range", f"below {limit}", largest, token)
        if block_ids[(shape.tokens - block * BLOCK_TOKENS) * row_ids :].any():
            raise source.error("payload", at, "ids after the last token", "zeros", "others")
    if not shape.num_experts and len(blocks) == shape.blocks and shape.id_bits != smallest_id_bits(largest + 1):
        raise source.error("id_bits", 11, "fewer would do", smallest_id_bits(largest + 1), shape.id_bits)
    return ids


def _check_uncovered(
    source: BlobSource, shape: Shape, routed_experts: np.ndarray, covered: np.ndarray, first: int
) -> None:
    """Raise unless the ids of uncovered (token, layer) pairs are zero."""
    if covered.all():
        return
    rows = np.nonzero(~covered if covered.shape[1] > 1 else ~covered[:, 0])
    strays = routed_experts[rows].reshape(len(rows[0]), -1).any(axis=1)
    if strays.any():
        row = tuple(axis[np.argmax(strays)] for axis in rows)
        token = first + int(row[0])
        at = shape.block_at(token // BLOCK_TOKENS)
        raise source.error("payload", at, "ids where nothing is covered", "zeros", routed_experts[row].tolist(), token)


def _check_crc(source: BlobSource, field: str, at: int, raw: bytes | memoryview, expected: int) -> None:
    if (actual := zlib.crc32(raw)) != expected:
        raise source.error(field, at, "corrupted", f"checksum {expected:08x}", f"{actual:08x}")
