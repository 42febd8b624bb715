"""What has changed in the weights since the last update, and the same weights made of it again, bit for bit.

An optimizer step changes few of the bits of half-precision weights, but it does so in nearly every row. So elements
are compared, not rows: the sender keeps a copy of what it has sent, the receiver of what it has got, each in host
memory and in the checkpoint's form, since kernels keep weights in forms that cannot be changed in part.

A tensor travels in whichever of these forms is the smallest:

    same       nothing
    elements   values, and the distance of each from the one before (uint16, or as wide as needed)
    rows       numbers of rows of the last dimension, and the rows
    whole      all of it

With each goes the CRC-32 of the whole new tensor, which the receiver compares with what it has made.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from moe_replay.errors import EngineError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT, _VALUES = "#at", "#values"
_METADATA = "changes"
_THREADS = min(16, os.cpu_count() or 1)  # comparing and checksums run without the interpreter's lock


class _Change(BaseModel):
    """Encoding of one tensor in an update."""

    model_config = ConfigDict(extra="forbid")

    form: Literal["same", "elements", "rows", "whole"]
    dtype: str
    shape: list[int]
    checksum: int


_CHANGES = TypeAdapter(dict[str, _Change])


class Changes:
    """The changes of some tensors, serialised once for however many engines."""

    def __init__(self, news: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._told: dict[str, _Change] = {}
        with ThreadPoolExecutor(_THREADS) as threads:
            found = threads.map(lambda name: _change(news[name], base.get(name)), news)
            for name, (change, arrays) in zip(news, found, strict=True):
                self._told[name] = change
                self._arrays |= {name + part: array for part, array in arrays.items()}
        self._lock = threading.Lock()
        self._content: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Size of what has changed."""
        return sum(array.nbytes for array in self._arrays.values())

    @property
    def content(self) -> bytes:
        """The changes as a safetensors file."""
        from safetensors.numpy import save

        with self._lock:
            if self._content is None:
                self._content = save(self._arrays, {_METADATA: _CHANGES.dump_json(self._told).decode()})
            return self._content


def apply_changes(content: bytes, base: dict[str, Tensor]) -> Iterator[str]:
    """Apply changes in place, replace tensors that were sent whole, and yield the name of each once it is verified."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(content)
        (length,) = struct.unpack_from("<Q", content)
        told = _CHANGES.validate_json(json.loads(content[8 : 8 + length])["__metadata__"][_METADATA])
    except (SafetensorError, ValidationError, LookupError, TypeError, ValueError) as wrong:
        raise EngineError(f"changes of weights that cannot be read: {wrong}") from wrong
    with ThreadPoolExecutor(_THREADS) as threads:
        made = threads.map(lambda name: _changed(name, told[name], arrays, base.get(name)), told)
        for name, tensor in zip(told, made, strict=True):
            base[name] = tensor
            yield name


# ---- one tensor -----------------------------------------------------------------------------------------------------


def _change(new: Tensor, old: Tensor | None) -> tuple[_Change, dict[str, np.ndarray]]:
    bits = _flat_bits(new)
    form, arrays = _smallest(new, bits, old)
    dtype = str(new.dtype).removeprefix("torch.")
    return _Change(form=form, dtype=dtype, shape=list(new.shape), checksum=zlib.crc32(bits.data)), arrays


def _smallest(
    new: Tensor, bits: np.ndarray, old: Tensor | None
) -> tuple[Literal["same", "elements", "rows", "whole"], dict[str, np.ndarray]]:
    whole = {_VALUES: bits}
    if old is None or old.shape != new.shape or old.dtype != new.dtype:
        return "whole", whole
    at = np.flatnonzero(bits != _flat_bits(old))
    if not at.size:
        return "same", {}
    gaps = np.diff(at, prepend=0)
    gaps = gaps.astype(np.min_scalar_type(max(int(gaps.max()), 256)))  # uint16 or wider
    width = new.shape[-1] if new.dim() else 1
    rows = at // width
    rows = rows[np.diff(rows, prepend=-1) > 0]
    sizes = {
        "elements": at.size * (gaps.itemsize + bits.itemsize),
        "rows": rows.size * (8 + width * bits.itemsize),
        "whole": bits.nbytes,
    }
    if sizes["elements"] <= min(sizes["rows"], sizes["whole"]):
        return "elements", {_AT: gaps, _VALUES: bits[at]}
    if sizes["rows"] < sizes["whole"]:
        return "rows", {_AT: rows, _VALUES: bits.reshape(-1, width)[rows]}
    return "whole", whole


def _changed(name: str, told: _Change, arrays: Mapping[str, np.ndarray], old: Tensor | None) -> Tensor:
    """Return the tensor with its changes; raise unless it is the sender's."""
    dtype = getattr(torch, told.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"changes of {name} in an unknown type", found=told.dtype)
    if told.form == "whole":
        tensor = torch.from_numpy(_given(arrays, name + _VALUES).copy()).view(dtype).reshape(told.shape)
    elif old is None or old.dtype != dtype or list(old.shape) != told.shape:
        raise EngineError(f"changes of {name}, of which there is no such tensor", expected=told.shape)
    else:
        tensor = old
        bits = _flat_bits(tensor)
        try:
            if told.form == "elements":
                bits[np.cumsum(_given(arrays, name + _AT), dtype=np.int64)] = _given(arrays, name + _VALUES)
            elif told.form == "rows":
                bits.reshape(-1, told.shape[-1])[_given(arrays, name + _AT)] = _given(arrays, name + _VALUES)
        except (IndexError, ValueError) as wrong:
            raise EngineError(f"changes of {name} that do not fit", found=wrong) from wrong
    found = zlib.crc32(_flat_bits(tensor).data)
    if found != told.checksum:
        raise EngineError(
            f"{name} is not the sender's after its changes",
            expected=f"checksum {told.checksum:08x}",
            found=f"{found:08x}",
            remedy="The next update has all weights",
        )
    return tensor


def _given(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise EngineError("changes of weights without their values", expected=name)
    return arrays[name]


def _flat_bits(tensor: Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as whole numbers, (N,)."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()]).numpy()


# ---- both ends ------------------------------------------------------------------------------------------------------


class SentWeights:
    """The weights of the last update, on the side of the sender.

    full_every   all weights are sent once in this many updates
    base_id      of the update that the next changes refer to; empty: all weights must be sent
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._updates = 0
        self._tensors: dict[str, Tensor] = {}
        self._id = ""
        self.base_id = ""

    def begin(self) -> None:
        """Begin an update; until `end` there is no base for another."""
        self.base_id = self._id if self._updates % self._full_every else ""
        self._updates += 1
        self._id = ""

    def changes(self, tensors: Mapping[str, Tensor]) -> Changes | None:
        """Return the changes of some tensors, which are kept; None in an update with all weights."""
        found = Changes(tensors, self._tensors) if self.base_id else None
        self._tensors |= tensors
        return found

    def end(self, weights_id: str) -> None:
        """Take note that all tensors of the update were given."""
        self._id = weights_id


class KeptWeights:
    """The weights of the last update, on the side of the receiver: one copy of the checkpoint in host memory.

    weights_id   of the update; empty: none is kept
    """

    def __init__(self) -> None:
        self.weights_id = ""
        self._tensors: dict[str, Tensor] = {}

    def drop(self) -> None:
        """Forget the copy."""
        self.weights_id, self._tensors = "", {}

    def keep(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights of an update and keep them."""
        self.drop()
        for name, tensor in weights:
            self._tensors[name] = tensor
            yield name, tensor

    def change(self, base_id: str, frames: Iterable[bytes]) -> Iterator[tuple[str, Tensor]]:
        """Read all changes, then return the new weights; raise before that if one of them is not the sender's."""
        if not base_id or base_id != self.weights_id:
            raise EngineError(
                "changes of weights that the server does not have", expected=base_id, found=self.weights_id or "none"
            )
        tensors = self._tensors
        self.drop()  # in case it fails
        seen = {name for frame in frames for name in apply_changes(frame, tensors)}
        if missing := sorted(tensors.keys() - seen):
            raise EngineError("changes of weights do not name every tensor", found=f"{missing[0]} is missing")
        self._tensors = tensors
        return iter(tensors.items())
