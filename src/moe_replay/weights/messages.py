"""Messages of a weight transfer, as JSON. They need pydantic, which sampling alone does not."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, Field, ValidationError

from moe_replay.errors import EngineError
from moe_replay.weights.source import TensorInfo

TransferKind = Literal["ipc", "nccl"]
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class BufferHandle(BaseModel, extra="forbid"):
    """Handle by which another process opens a buffer: a file in memory, or the fields of a CUDA IPC handle.

    rank   that has the buffer; a new handle of the same rank replaces the one before
    """

    nbytes: int
    file: str = ""
    memory: str = ""
    storage_bytes: int = 0
    storage_offset: int = 0
    counter: str = ""
    counter_offset: int = 0
    event: str = ""
    event_sync: bool = False
    rank: int = 0


class TransferSettings(BaseModel, extra="forbid"):
    """Settings that a worker joins a transfer with.

    host, port   of the sender's store
    token        of the transfer, which names its keys there
    first        number of the engine's first worker, of all `workers`
    senders      ranks of the trainer in the group of a broadcast, before the workers
    """

    kind: TransferKind
    host: str
    port: int = Field(ge=1, le=65535)
    token: str = Field(min_length=1, repr=False)
    first: int = Field(ge=0)
    workers: int = Field(ge=1)
    timeout_s: float = Field(gt=0)
    senders: int = Field(default=1, ge=1)


class ChunkMessage(BaseModel, extra="forbid"):
    """One chunk: tensors in their order in the buffer, and the buffer where it is a new one.

    capacity   of the buffer, in bytes
    handles    of the buffer that the worker on each device reads, by `device_id`
    root       number of the broadcasting rank among the senders
    rows       of tensors that are parts of larger ones: first row there, and rows of the whole
    """

    number: int = Field(ge=0)
    nbytes: int = 0
    capacity: int = 0
    tensors: list[tuple[str, str, list[int]]] = []
    handles: dict[str, BufferHandle] = {}
    root: int = Field(default=0, ge=0)
    rows: dict[str, tuple[int, int]] = {}

    def infos(self) -> list[TensorInfo]:
        for name, dtype, _ in self.tensors:
            if dtype not in DTYPES:
                raise EngineError(f"the tensor {name} has an unknown type", found=dtype)
        return [TensorInfo(name, DTYPES[dtype], tuple(shape)) for name, dtype, shape in self.tensors]


class SharedTensor(BaseModel, extra="forbid"):
    """A tensor in memory that two processes compute with.

    memory   number of its memory in `SharedWeights`
    offset   of its first element there, in elements; the others follow without gaps
    """

    name: str
    dtype: str
    shape: list[int]
    memory: int = Field(ge=0)
    offset: int = Field(ge=0)


class SharedWeights(BaseModel, extra="forbid"):
    """Weights of an engine's worker, for the trainer on the same device to open.

    device   its `device_id`
    """

    device: str
    memories: list[BufferHandle]
    tensors: list[SharedTensor]


def read_message(text: str) -> ChunkMessage:
    try:
        return ChunkMessage.model_validate_json(text)
    except ValidationError as error:
        raise EngineError(f"a transfer with an unreadable message: {error}") from error
