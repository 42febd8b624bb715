"""New weights as the body of one HTTP request: a header, safetensors files, and an end marker against truncation.

frame: u64 length (little-endian) | that many bytes
body:  frame with the header (JSON) | frame with a safetensors file, any number of times | empty frame
       a length of 2^64 - 1 in place of a frame: the sender has failed, and the update with it

The frames of a transfer are its messages (JSON), the last of them the end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor

from moe_replay.errors import EngineError
from moe_replay.weights.checkpoint import packed
from moe_replay.weights.identity import Probe
from moe_replay.weights.lora_adapter import Adapter
from moe_replay.weights.messages import TransferSettings
from moe_replay.weights.source import Tensors, Weights
from moe_replay.weights.transfer import Transfer, TransferError

MAX_FRAME_BYTES = 8 * 2**30
_SLICE_BYTES = 2**19
_LENGTH = struct.Struct("<Q")
_BROKEN_OFF = 2**64 - 1

Read = Callable[[int], bytes]  # returns exactly that many bytes of the body, or raises


class _ProbeHeader(BaseModel, extra="forbid"):
    token_ids: list[int]
    logprobs: list[FiniteFloat]
    tolerance: float


class _AdapterHeader(BaseModel, extra="forbid"):
    rank: int = Field(ge=1)
    alpha: float
    parameters: tuple[str, ...] = ()

    def with_tensors(self, tensors: Tensors) -> Adapter:
        return Adapter(tensors, self.rank, self.alpha, self.parameters)


class UpdateHeader(BaseModel, extra="forbid"):
    """Version of the weights that follow, or of those in a folder that the server can read; a probe; and their id.

    transfer   the frames that follow are the messages of a transfer with these settings
    adapter    the frames that follow are the tensors of an adapter, under PEFT's names
    """

    version: int = Field(ge=0)
    folder: str | None = None
    probe: _ProbeHeader | None = None
    weights_id: str = Field("", max_length=256)
    transfer: TransferSettings | None = None
    adapter: _AdapterHeader | None = None

    def to_probe(self) -> Probe | None:
        if self.probe is None:
            return None
        logprobs = np.asarray(self.probe.logprobs, np.float32)
        return Probe(token_ids=self.probe.token_ids, logprobs=logprobs, tolerance=self.probe.tolerance)


def write_update(
    weights: Weights | Adapter | Transfer, version: int, probe: Probe | None, weights_id: str = "", url: str = ""
) -> Iterator[bytes]:
    """Yield the body of a request in chunks.

    url   of the server, which has its own settings in a transfer
    """
    sent = None
    if probe is not None:
        ids, logprobs = [int(token) for token in probe.token_ids], np.asarray(probe.logprobs).tolist()
        sent = _ProbeHeader(token_ids=ids, logprobs=logprobs, tolerance=probe.tolerance)
    folder = str(weights.absolute()) if isinstance(weights, Path) else None
    header = UpdateHeader(
        version=version,
        folder=folder,
        probe=sent,
        weights_id=weights_id,
        transfer=weights.for_engine(url) if isinstance(weights, Transfer) else None,
        adapter=_AdapterHeader(rank=weights.rank, alpha=weights.alpha, parameters=weights.parameters)
        if isinstance(weights, Adapter)
        else None,
    )
    yield from _frame(header.model_dump_json(exclude_none=True).encode())
    if isinstance(weights, Transfer):
        for message in weights.messages:
            yield from _frame(message.encode())
    elif not isinstance(weights, Path):
        try:
            for content in packed(weights.tensors if isinstance(weights, Adapter) else weights):
                yield from _frame(content)
        except TransferError:  # a connection that is closed may be closed before the server has seen the header
            yield _LENGTH.pack(_BROKEN_OFF)
            return
    yield from _frame(b"")


def read_header(read: Read) -> UpdateHeader:
    try:
        return UpdateHeader.model_validate_json(_read_frame(read, limit=2**24))
    except ValidationError as error:
        raise EngineError(f"an update with an unreadable header: {error}") from error


def read_transfer(read: Read, settings: TransferSettings) -> Transfer:
    """Return the transfer that the header announces; its messages are read from the frames that follow."""

    def messages() -> Iterator[str]:
        while frame := _read_frame(read, limit=2**28):
            yield frame.decode()

    return Transfer({"": settings}, messages())


def read_tensors(read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the frames that follow; raise unless the body ends with the end marker."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    while frame := _read_frame(read, MAX_FRAME_BYTES):
        try:
            tensors = load(frame)
        except SafetensorError as error:
            raise EngineError(f"an update with a frame that is not safetensors: {error}") from error
        yield from tensors.items()


def _frame(content: bytes) -> Iterator[bytes]:
    """Yield a frame in small slices: the HTTP client copies what is left of a slice after every write to its socket."""
    yield _LENGTH.pack(len(content))
    for start in range(0, len(content), _SLICE_BYTES):
        yield content[start : start + _SLICE_BYTES]


def _read_frame(read: Read, limit: int) -> bytes:
    (length,) = _LENGTH.unpack(read(_LENGTH.size))
    if length == _BROKEN_OFF:
        raise EngineError("the sender of an update broke off")
    if length > limit:
        raise EngineError("a frame of an update is too large", expected=f"at most {limit} bytes", found=length)
    return read(length)
