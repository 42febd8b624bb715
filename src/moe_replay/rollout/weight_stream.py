"""New weights as the body of one HTTP request: an order, then safetensors files, then an end that proves it is whole.

frame: u64 length (little-endian) | that many bytes
body:  frame with the order (JSON) | frame with a safetensors file, any number of times | empty frame
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from moe_replay.errors import EngineError
from moe_replay.rollout.types import Probe, Weights
from moe_replay.rollout.weights import packed

CHUNK_BYTES = 64 * 2**20
MOST_FRAME_BYTES = 8 * 2**30
_LENGTH = struct.Struct("<Q")

Read = Callable[[int], bytes]  # exactly so many bytes of the body, or an error


class _ProbeOrder(BaseModel):
    model_config = ConfigDict(extra="forbid")

    token_ids: list[int]
    logprobs: list[float]
    tolerance: float


class Order(BaseModel):
    """What is to be done: the version of the weights that follow, or of those in a folder that the server sees."""

    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=0)
    folder: str | None = None
    probe: _ProbeOrder | None = None

    def to_probe(self) -> Probe | None:
        """The probe, if one was sent."""
        if self.probe is None:
            return None
        logprobs = np.asarray(self.probe.logprobs, np.float32)
        return Probe(token_ids=self.probe.token_ids, logprobs=logprobs, tolerance=self.probe.tolerance)


def write_update(weights: Weights, version: int, probe: Probe | None) -> Iterator[bytes]:
    """The body of a request, piece by piece."""
    sent = None
    if probe is not None:
        ids, logprobs = [int(token) for token in probe.token_ids], np.asarray(probe.logprobs).tolist()
        sent = _ProbeOrder(token_ids=ids, logprobs=logprobs, tolerance=probe.tolerance)
    folder = str(weights.absolute()) if isinstance(weights, Path) else None
    yield from _frame(Order(version=version, folder=folder, probe=sent).model_dump_json().encode())
    if not isinstance(weights, Path):
        for chunk in packed(weights, CHUNK_BYTES):
            yield from _frame(chunk)
    yield from _frame(b"")


def read_order(read: Read) -> Order:
    """The first frame of a body."""
    try:
        return Order.model_validate_json(_read_frame(read, most=2**24))
    except ValidationError as wrong:
        raise EngineError(f"an update that cannot be understood: {wrong}") from wrong


def read_tensors(read: Read) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the frames that follow; an error unless the body ends as it should."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    while frame := _read_frame(read, MOST_FRAME_BYTES):
        try:
            tensors = load(frame)
        except SafetensorError as wrong:
            raise EngineError(f"an update with something else than safetensors: {wrong}") from wrong
        yield from tensors.items()


def _frame(content: bytes) -> Iterator[bytes]:
    yield _LENGTH.pack(len(content))
    yield content


def _read_frame(read: Read, most: int) -> bytes:
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length > most:
        raise EngineError("a part of an update is too large", expected=f"at most {most} bytes", found=length)
    return read(length)
