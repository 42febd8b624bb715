"""Encode a `RouteTrace` as bytes, and decode it whole or in part. The format is in `codec.py`."""

from __future__ import annotations

from collections.abc import Sequence

from moe_replay.routes.codec import DEFAULT_LIMITS, BlobSource, Limits, buffer_source, decode, encode
from moe_replay.routes.trace import RouteTrace


def encode_trace(trace: RouteTrace, *, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """Return the canonical encoding of a trace."""
    return b"".join(encode(trace.parts, limits))


def encode_parts(trace: RouteTrace, *, limits: Limits = DEFAULT_LIMITS) -> list[memoryview]:
    """`encode_trace` as buffers, for vectored writes. Up to 256 experts, ids are views of the trace and not copied."""
    return encode(trace.parts, limits)


def decode_trace(
    data: bytes | bytearray | memoryview,
    tokens: slice = slice(None),
    layers: Sequence[int] | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> RouteTrace:
    """Return the trace in a blob, or only a range of its tokens and some of its layers.

    Every byte that is used is verified; only `RouteTrace.check_rows` is left to the user of the routes. A read-only
    buffer is viewed, a writable one copied: `memoryview(buffer).toreadonly()` promises not to write any more.
    """
    return read_blob(buffer_source(data), tokens, layers, limits)


def read_blob(source: BlobSource, tokens: slice, layers: Sequence[int] | None, limits: Limits) -> RouteTrace:
    """Return the chosen tokens and layers of a blob."""
    parts, chosen = decode(source, tokens, limits)
    trace = RouteTrace.from_parts(parts)[chosen]
    return trace if layers is None else trace.select_layers(layers)
