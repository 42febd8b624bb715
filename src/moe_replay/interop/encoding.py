"""Arrays inside text, as other projects send them: validated, and never larger than the tokens allow."""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from moe_replay.interop.rows import PeerError, to_array
from moe_replay.routes.topology import MoeTopology

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


def from_base64(text: Any, limit: int, peer: str, sample: int | None = None) -> bytes:
    """Decode base64 text of at most `limit` bytes, which is checked before decoding."""
    if not isinstance(text, str | bytes | bytearray | memoryview):
        raise PeerError(f"routes of {peer} must be base64", sample=sample, found=type(text).__name__)
    if len(text) > 4 * -(-limit // 3):
        raise PeerError(
            f"routes of {peer} are larger than those of these tokens can be",
            sample=sample,
            expected=f"at most {limit} bytes",
            found=f"{len(text)} characters of base64",
            remedy="Give all token ids, prompt and completion",
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as wrong:
        raise PeerError(f"routes of {peer} cannot be read: {wrong}", sample=sample, expected="base64") from wrong


def to_base64(array: np.ndarray) -> str:
    """Encode the bytes of an array, little-endian."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode("ascii")


def array_of(raw: bytes, dtype: Any, shape: Any, peer: str, sample: int | None = None) -> np.ndarray:
    """Return the array of a claimed dtype and shape; the number of bytes must match exactly."""
    if dtype not in INTEGERS:
        raise PeerError(f"routes of {peer} have an unknown dtype", sample=sample, expected=INTEGERS, found=repr(dtype))
    plausible = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) <= 4
    if not plausible or any(type(size) is not int or size < 0 for size in shape):
        raise PeerError(f"routes of {peer} have an impossible shape", sample=sample, found=repr(shape))
    kind = np.dtype(dtype).newbyteorder("<")
    if len(raw) != math.prod(shape) * kind.itemsize:
        raise PeerError(
            f"routes of {peer} are truncated, or not of the shape they claim",
            sample=sample,
            expected=f"{math.prod(shape) * kind.itemsize} bytes for {dtype} {tuple(shape)}",
            found=f"{len(raw)} bytes",
        )
    return np.frombuffer(raw, kind).reshape(shape)


def _unpack(sent: Mapping[str, Any], limit: int, peer: str, sample: int | None) -> np.ndarray:
    """Return the array in {"data": base64, "shape": ..., "dtype": ...}."""
    if not {"data", "shape", "dtype"} <= sent.keys():
        raise PeerError(
            f"routes of {peer} are no packed array", sample=sample, expected="data, shape and dtype", found=sorted(sent)
        )
    return array_of(from_base64(sent["data"], limit, peer, sample), sent["dtype"], sent["shape"], peer, sample)


PackedRoutes = Mapping[str, Any] | np.ndarray | Tensor
"""Routes as they are sent, {"data": base64, "shape": ..., "dtype": ...}, or as the array that becomes of it."""


def unpack_routes(
    routes: PackedRoutes, tokens: int, topology: MoeTopology, peer: str, sample: int | None = None
) -> np.ndarray:
    """Return the array of the routes of `tokens` tokens."""
    if isinstance(routes, Mapping):
        return _unpack(routes, max_bytes(tokens, topology), peer, sample)
    return to_array(routes, peer, sample)


def pack_routes(rows: np.ndarray) -> dict[str, Any]:
    """Return an array in the form in which it is sent."""
    return {"data": to_base64(rows), "shape": list(rows.shape), "dtype": rows.dtype.name}


def from_npy(raw: bytes, peer: str, sample: int | None = None) -> np.ndarray:
    """Return the integers in a .npy file; the shape in its header must match the number of bytes.

    The header is read as text in the form that numpy writes, and never evaluated as Python.
    """
    size = _NPY_SIZES.get(raw[:8])
    start = 8 + (struct.calcsize(size) if size else 0)
    stop = start + struct.unpack(size, raw[8:start])[0] if size and len(raw) >= start else 0
    header = _NPY_HEADER.fullmatch(raw[start:stop].decode("latin-1"))
    if header is None:
        raise PeerError(
            f"routes of {peer} cannot be read",
            sample=sample,
            expected="a .npy file of format 1.0 or 2.0",
            found=repr(raw[:64]),
            remedy="It was damaged or cut off on its way",
        )
    dtype, order, sizes = header.groups()
    if order == "True" or dtype not in _NPY_INTEGERS:
        raise PeerError(
            f"routes of {peer} are laid out in an unknown way",
            sample=sample,
            expected="little-endian integers in C order",
            found=f"{'objects' if dtype.endswith('O') else dtype}, {'Fortran' if order == 'True' else 'C'} order",
        )
    shape = [int(number) for number in sizes.split(",") if number.strip()]
    return array_of(raw[stop:], _NPY_INTEGERS[dtype], shape, peer, sample)


def to_npy(array: np.ndarray) -> bytes:
    """Return an array as a .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()
