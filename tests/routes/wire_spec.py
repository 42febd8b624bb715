"""Random traces, and a writer of them in plain Python, made from docs/trace-format.md."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from hypothesis import strategies as st

from moe_replay.routes.trace import RouteTrace


def make_trace(
    tokens: int,
    layers: int = 3,
    top_k: int = 4,
    num_experts: int | None = 128,
    *,
    coverage: str = "all",
    spans: int = 1,
    largest: int = 127,
    seed: int = 0,
) -> RouteTrace:
    """Random routes; `largest` bounds the ids where the number of experts is unknown."""
    rng = np.random.default_rng(seed)
    ids = num_experts or largest + 1
    offsets = np.stack([rng.permutation(ids)[:top_k] for _ in range(layers)])
    experts = (rng.integers(0, ids, (tokens, layers, 1)) + offsets) % ids
    valid = {
        "all": None,
        "tokens": rng.random(tokens) < 0.7,
        "token_layers": rng.random((tokens, layers)) < 0.7,
        "none": np.zeros(tokens, bool),
    }[coverage]
    starts = sorted({0, *rng.integers(0, max(tokens, 1), spans - 1).tolist()})
    versions = [(start, int(rng.integers(0, 2**63 - 1))) for start in starts]
    layer_ids = np.sort(rng.permutation(4 * layers)[:layers]).tolist()
    token_ids = rng.integers(0, 2**31, tokens)
    return RouteTrace(token_ids, experts, layer_ids, valid, versions, num_experts=num_experts)


@st.composite
def traces(draw: st.DrawFn, max_tokens: int = 1300) -> RouteTrace:
    num_experts = draw(st.one_of(st.none(), st.integers(2, 1000)))
    largest = draw(st.sampled_from([7, 255, 256, 511, 512, 1023]))
    return make_trace(
        draw(st.one_of(st.integers(0, 20), st.integers(0, max_tokens), st.sampled_from([511, 512, 513, 1024]))),
        draw(st.integers(1, 9)),
        draw(st.integers(1, min(num_experts or 8, 8))),
        num_experts,
        coverage=draw(st.sampled_from(["all", "tokens", "token_layers", "none"])),
        spans=draw(st.integers(1, 4)),
        largest=largest,
        seed=draw(st.integers(0, 2**32)),
    )


def spec_digest(block: bytes) -> int:
    words = [value for (value,) in struct.iter_unpack("<Q", block)]
    rows = [words[i : i + 512] for i in range(0, len(words), 512)]
    row_sums = [sum(row) % 2**64 for row in rows]
    column_sums = [sum(row[column] for row in rows if column < len(row)) % 2**64 for column in range(512)]
    crcs = [zlib.crc32(b"".join(struct.pack("<Q", value) for value in sums)) for sums in (row_sums, column_sums)]
    return crcs[0] + crcs[1] * 2**32


def spec_bits(bits: list[bool]) -> bytes:
    padded = bits + [False] * (-len(bits) % 8)
    return bytes(sum(padded[8 * i + j] << j for j in range(8)) for i in range(len(padded) // 8))


def spec_encode(trace: RouteTrace) -> bytes:
    ids: list[int] = trace.routed_experts.reshape(-1).tolist()
    id_bits = max(8, ((trace.num_experts or max(ids, default=0) + 1) - 1).bit_length())
    row = len(trace.layers) * trace.top_k
    blocks = []
    for first in range(0, len(trace), 512):
        block_ids = ids[first * row : (first + 512) * row]
        block_ids += [0] * (-len(block_ids) % 64)
        planes = [spec_bits([bool(i >> bit & 1) for i in block_ids]) for bit in range(8, id_bits)]
        blocks.append(b"".join([bytes(i & 255 for i in block_ids), *planes]))
    valid: list[list[bool]] = trace.valid.tolist()
    if all(all(layers) for layers in valid):
        mode, bitmap = 0, b""
    elif all(len(set(layers)) == 1 for layers in valid):
        mode, bitmap = 1, spec_bits([layers[0] for layers in valid])
    else:
        mode, bitmap = 2, b"".join(spec_bits(layers) for layers in valid)
    sections = b"".join(struct.pack("<QQ", *span) for span in trace.versions)
    sections += b"".join(struct.pack("<Q", spec_digest(block)) for block in blocks)
    sections += b"".join(struct.pack("<I", layer) for layer in trace.layers)
    sections += b"".join(struct.pack("<I", token) for token in trace.token_ids.tolist()) + bitmap
    sections += bytes(-len(sections) % 64)
    header = b"\x89MRT\r\n\x1a\n" + struct.pack("<HBBBB", 1, 1, id_bits, mode, 0)
    header += struct.pack("<HII", trace.top_k, len(trace.layers), trace.num_experts or 0)
    header += struct.pack("<QII", len(trace), len(trace.versions), 0)
    header += struct.pack("<QQ", 64 + len(sections) + sum(len(block) for block in blocks), 0)
    header += struct.pack("<I", zlib.crc32(sections))
    return header + struct.pack("<I", zlib.crc32(header)) + sections + b"".join(blocks)
