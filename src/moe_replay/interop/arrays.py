"""Arrays of expert ids as other projects hold them: decoded within limits, into a checked `RouteTrace`, and back.

The convention of each project is in `conventions.py`. The functions here take one row for each token that has a route,
with a slice for every decoder layer, as engines report it; `capture.py` checks those.
"""

from __future__ import annotations

import base64
import io
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from moe_replay.errors import EngineError, TraceError
from moe_replay.interop.capture import captured_layers, trace_from_capture
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

TokenIds = Sequence[int] | np.ndarray | Tensor
WeightVersion = int | Sequence[tuple[int, int]]


class RouteFormatError(TraceError):
    """Routes that do not follow the convention of the project named, or that it cannot express."""


def to_array(value: Any, project: str, sample: int | None = None) -> np.ndarray:
    """Return integers in host memory, from an array, a tensor on any device or nested lists."""
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "iu":
        raise RouteFormatError(
            f"routes of {project} must be integers", sample=sample, found=f"{array.dtype} {array.shape}"
        )
    return array


def to_ids(token_ids: TokenIds) -> np.ndarray:
    """(T,) token ids in host memory; the trace checks them."""
    return token_ids.detach().cpu().numpy() if isinstance(token_ids, Tensor) else np.asarray(token_ids)


def num_written(routed_experts: np.ndarray, tokens: int, top_k: int) -> int:
    """Return how many leading rows (n, layers, K) hold routes, in a convention that fills up with zeros at the end.

    At top 1 zeros may be a choice, and a sample without any route is an engine that captured nothing: then the last
    token alone may be without one.
    """
    written = np.flatnonzero(routed_experts.any(axis=(1, 2)))
    least = tokens - 1 if top_k == 1 or not written.size else 0
    return max(least, int(written[-1]) + 1 if written.size else 0)


def by_decoder_layer(routed_experts: np.ndarray, topology: MoeTopology) -> np.ndarray:
    """(n, MoE layers, K) -> (n, decoder layers, K), zeros in dense ones; unchanged if it has all layers already."""
    routing = captured_layers(topology)
    layers = routed_experts.shape[1]
    if layers == topology.num_layers or layers != len(routing):
        return routed_experts
    wide = np.zeros((len(routed_experts), topology.num_layers, routed_experts.shape[2]), routed_experts.dtype)
    wide[:, routing] = routed_experts
    return wide


def trace_of(
    routed_experts: np.ndarray,
    token_ids: TokenIds,
    topology: MoeTopology,
    source: str,
    *,
    positions: np.ndarray | None = None,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of all T tokens; those without a row are uncovered.

    routed_experts   (n, decoder layers, K), zeros in dense layers
    source           engine or project, for errors
    positions        (n,) token that each row belongs to; None: the first n
    """
    ids = to_ids(token_ids)
    rows_at = np.arange(len(routed_experts)) if positions is None else positions
    try:
        captured = trace_from_capture(routed_experts, ids[rows_at], topology, source, sample=sample)
    except EngineError as error:  # its token is an index into the rows
        token = int(rows_at[error.token]) if isinstance(error.token, int) else None
        raise RouteFormatError(error.problem, **error.facts | {"sample": sample, "token": token}) from error
    whole = np.zeros((len(ids), *captured.routed_experts.shape[1:]), captured.routed_experts.dtype)
    valid = np.zeros(whole.shape[:2], bool)
    whole[rows_at], valid[rows_at] = captured.routed_experts, captured.valid
    return RouteTrace(ids, whole, captured.layers, valid, weight_version, num_experts=topology.num_experts)


def covered_tokens(trace: RouteTrace, topology: MoeTopology, project: str) -> np.ndarray:
    """(T,) bool: tokens with a route in every layer; a token with routes in some of them cannot be expressed."""
    captured = trace.select_layers(captured_layers(topology))
    valid = captured.valid
    covered = np.asarray(valid.all(axis=1))
    partly = np.flatnonzero(valid.any(axis=1) & ~covered)
    if partly.size:
        token = int(partly[0])
        raise RouteFormatError(
            f"{project} cannot say that a token has routes in some layers only",
            layer=captured.layers[int(np.argmin(valid[token]))],
            token=token,
            expected="routes in all layers, or in none",
            found=f"routes in {np.count_nonzero(valid[token])} of {valid.shape[1]}",
        )
    return covered


def covered_prefix(trace: RouteTrace, topology: MoeTopology, project: str) -> int:
    """Return how many leading tokens have routes; a gap cannot be expressed."""
    covered = covered_tokens(trace, topology, project)
    count = int(np.count_nonzero(covered))
    if not covered[:count].all():
        raise RouteFormatError(
            f"{project} cannot say that a token before another with routes has none",
            token=int(np.argmin(covered)),
            expected=f"routes for the first {count} tokens",
            found="a token without a route among them",
            remedy="Its trainer would send such a token to expert 0: let an engine prefill the sequence again",
        )
    return count


def in_decoder_layers(trace: RouteTrace, topology: MoeTopology) -> np.ndarray:
    """(T, decoder layers, K) as engines report it: zeros in dense layers and for uncovered tokens."""
    layers = captured_layers(topology)
    wide = np.zeros((len(trace), topology.num_layers, trace.top_k), trace.routed_experts.dtype)
    wide[:, layers] = trace.select_layers(layers).routed_experts
    return wide


def all_but_last(trace: RouteTrace, topology: MoeTopology, project: str) -> np.ndarray:
    """(T-1, decoder layers, K) as engines return it; all tokens but the last must have routes."""
    count, needed = covered_prefix(trace, topology, project), max(len(trace) - 1, 0)
    if count < needed:
        raise RouteFormatError(
            f"{project} cannot say that a token before the last has no route",
            token=count,
            expected=f"routes for the first {needed} tokens",
            found=f"routes for {count}",
            remedy="Cut the trace after the last token with a route: trace[:length]",
        )
    return in_decoder_layers(trace, topology)[:needed]


# ---- arrays in text and bytes ----------------------------------------------------------------------------------------

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_WIDEST = 8  # bytes of an id
_HEADER = 4096  # bytes before the ids at most, of a format that has any

_NPY_SIZES = {b"\x93NUMPY\x01\x00": "<H", b"\x93NUMPY\x02\x00": "<I"}  # of the header, by magic and version
_NPY_HEADER = re.compile(
    r"\{'descr': '([^']{1,8})', 'fortran_order': (True|False), "
    r"'shape': \(((?:[0-9]{1,12}, ?)*(?:[0-9]{1,12})?)\),? ?\} *\n"
)
_NPY_INTEGERS = {np.dtype(name).newbyteorder("<").str: name for name in INTEGERS}


def max_bytes(tokens: int, topology: MoeTopology) -> int:
    """Return the most bytes that routes of `tokens` tokens can take: the widest dtype, and a header."""
    return tokens * topology.num_layers * topology.top_k * _WIDEST + _HEADER


def from_base64(text: Any, limit: int, project: str, sample: int | None = None) -> bytes:
    """Decode base64 text of at most `limit` bytes, which is checked before decoding."""
    if not isinstance(text, str | bytes | bytearray | memoryview):
        raise RouteFormatError(f"routes of {project} must be base64", sample=sample, found=type(text).__name__)
    if len(text) > 4 * -(-limit // 3):
        raise RouteFormatError(
            f"routes of {project} are larger than those of these tokens can be",
            sample=sample,
            expected=f"at most {limit} bytes",
            found=f"{len(text)} characters of base64",
            remedy="Give all token ids, prompt and completion",
        )
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RouteFormatError(
            f"routes of {project} cannot be read: {error}", sample=sample, expected="base64"
        ) from error


def to_base64(array: np.ndarray) -> str:
    """Encode the bytes of an array, little-endian."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode("ascii")


def array_of(raw: bytes, dtype: Any, shape: Any, project: str, sample: int | None = None) -> np.ndarray:
    """Return the array of a claimed dtype and shape; the number of bytes must match exactly."""
    if dtype not in INTEGERS:
        raise RouteFormatError(
            f"routes of {project} have an unknown dtype", sample=sample, expected=INTEGERS, found=repr(dtype)
        )
    plausible = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) <= 4
    if not plausible or any(type(size) is not int or size < 0 for size in shape):
        raise RouteFormatError(f"routes of {project} have an impossible shape", sample=sample, found=repr(shape))
    kind = np.dtype(dtype).newbyteorder("<")
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise RouteFormatError(
            f"routes of {project} are truncated, or not of the shape they claim",
            sample=sample,
            expected=f"{math.prod(shape) * kind.itemsize} bytes for {dtype} {tuple(shape)}",
            found=f"{len(raw)} bytes",
        )
    try:
        return np.frombuffer(raw, kind).reshape(shape)
    except ValueError as error:  # no ids at all, and axes that no array can have
        raise RouteFormatError(
            f"routes of {project} have an impossible shape", sample=sample, found=repr(shape)
        ) from error


PackedRoutes = Mapping[str, Any] | np.ndarray | Tensor
"""Routes as they are sent, {"data": base64, "shape": ..., "dtype": ...}, or the array itself."""


def unpack_routes(
    routed_experts: PackedRoutes, tokens: int, topology: MoeTopology, project: str, sample: int | None = None
) -> np.ndarray:
    if not isinstance(routed_experts, Mapping):
        return to_array(routed_experts, project, sample)
    if not {"data", "shape", "dtype"} <= routed_experts.keys():
        raise RouteFormatError(
            f"routes of {project} are no packed array",
            sample=sample,
            expected="data, shape and dtype",
            found=sorted(routed_experts),
        )
    raw = from_base64(routed_experts["data"], max_bytes(tokens, topology), project, sample)
    return array_of(raw, routed_experts["dtype"], routed_experts["shape"], project, sample)


def pack_routes(routed_experts: np.ndarray) -> dict[str, Any]:
    """Return an array in the form in which it is sent."""
    return {
        "data": to_base64(routed_experts),
        "shape": list(routed_experts.shape),
        "dtype": routed_experts.dtype.name,
    }


def from_npy(raw: bytes, project: str, sample: int | None = None) -> np.ndarray:
    """Return the integers in a .npy file; the shape in its header must match the number of bytes.

    The header is read as text in the form that numpy writes, and never evaluated as Python.
    """
    size = _NPY_SIZES.get(raw[:8])
    start = 8 + (struct.calcsize(size) if size else 0)
    stop = start + struct.unpack(size, raw[8:start])[0] if size and len(raw) >= start else 0
    header = _NPY_HEADER.fullmatch(raw[start:stop].decode("latin-1"))
    if header is None:
        raise RouteFormatError(
            f"routes of {project} cannot be read",
            sample=sample,
            expected="a .npy file of format 1.0 or 2.0",
            found=repr(raw[:64]),
            remedy="It was damaged or cut off on its way",
        )
    dtype, order, sizes = header.groups()
    if order == "True" or dtype not in _NPY_INTEGERS:
        raise RouteFormatError(
            f"routes of {project} are laid out in an unknown way",
            sample=sample,
            expected="little-endian integers in C order",
            found=f"{'objects' if dtype.endswith('O') else dtype}, {'Fortran' if order == 'True' else 'C'} order",
        )
    shape = [int(size) for size in sizes.split(",") if size.strip()]
    return array_of(raw[stop:], _NPY_INTEGERS[dtype], shape, project, sample)


def to_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
