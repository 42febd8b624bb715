"""One copy of frozen weights: memory of an engine's worker that the trainer, on the same device, computes with too.

The worker exports tensors that it computes with, and keeps them (`ExportedWeights`). The trainer opens their memory
(`OpenedWeights`) and makes its frozen parameters views of it: by CUDA's handles on a GPU, by mapping the same file in
memory on a CPU, as in weight transfers (`staging.py`). Neither side writes to it afterwards; their digests show that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from moe_replay.errors import EngineError
from moe_replay.weights.messages import DTYPES, BufferHandle, SharedTensor, SharedWeights
from moe_replay.weights.staging import ALIGNMENT, StagingBuffer, aligned, device_id, open_buffer, storage_handle

REMEDY = "Set rollout.share_weights = false: trainer and engine then have a copy each"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**23
"""Elements that a digest converts at a time: 64 MiB of integers."""
_FACTOR = 0x9E3779B1


def place_of(name: str) -> str:
    """Return where a weight is in a model: its layer, its module and its own name.

    Engines name what lies between layer and module otherwise; `mlp.gate.weight` and `block_sparse_moe.gate.weight` of
    a layer have the same place.
    """
    layer = _LAYER.search(name)
    return f"{layer[1] if layer else ''}:{'.'.join(name.split('.')[-2:])}"


class NamedRows(NamedTuple):
    """Some rows of an engine's parameter, under the name that they have in a Transformers model."""

    name: str
    parameter: Tensor
    rows: slice = slice(None)

    @property
    def tensor(self) -> Tensor:
        return self.parameter.detach()[self.rows]


class ExportedWeights:
    """Weights of this process that another one opens; kept as long as this object.

    On a CPU they first move into a file in memory.
    """

    def __init__(self, weights: Iterable[NamedRows], device: torch.device) -> None:
        self._weights = [weight for weight in weights if weight.tensor.is_contiguous() and weight.tensor.numel()]
        self._device = device
        self._file: StagingBuffer | None = None
        self._message = ""

    def message(self) -> str:
        """Return what the other process opens them with, as JSON."""
        if not self._message:
            memories = [self._move_to_file()] if self._device.type == "cpu" else self._handles()
            numbers = {address: number for number, (address, _) in enumerate(memories)}
            content = SharedWeights(
                device=device_id(self._device),
                memories=[handle for _, handle in memories],
                tensors=[_described(weight, numbers) for weight in self._weights],
            )
            self._message = content.model_dump_json()
        return self._message

    def _handles(self) -> list[tuple[int, BufferHandle]]:
        """Return address and handle of each memory."""
        storages: dict[int, Any] = {}
        for weight in self._weights:
            storage = weight.parameter.untyped_storage()
            storages[storage.data_ptr()] = storage
        return [(address, storage_handle(storage)) for address, storage in storages.items()]

    def _move_to_file(self) -> tuple[int, BufferHandle]:
        parameters = list({id(weight.parameter): weight.parameter for weight in self._weights}.values())
        sizes = {
            parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes() for parameter in parameters
        }
        self._file = StagingBuffer(self._device, sum(map(aligned, sizes.values())), shared=True)
        starts = dict(zip(sizes, accumulate(map(aligned, sizes.values()), initial=0), strict=False))
        places = [starts[parameter.untyped_storage().data_ptr()] for parameter in parameters]
        for start, parameter in zip(places, parameters, strict=True):
            storage = parameter.untyped_storage()
            part = self._file.bytes[start : start + storage.nbytes()]
            part.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            first = start // parameter.dtype.itemsize + int(parameter.storage_offset())
            typed = self._file.bytes[: len(self._file.bytes) // ALIGNMENT * ALIGNMENT].view(parameter.dtype)
            parameter.data = typed.as_strided(parameter.shape, parameter.stride(), first)
        return self._file.bytes.data_ptr(), self._file.handle()

    def digests(self) -> dict[str, str]:
        """Return the digest of each weight, by its place, as this process sees it now."""
        return digests({place_of(weight.name): weight.tensor for weight in self._weights})


def _described(weight: NamedRows, numbers: Mapping[int, int]) -> SharedTensor:
    tensor = weight.tensor
    return SharedTensor(
        name=weight.name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        memory=numbers[tensor.untyped_storage().data_ptr()],
        offset=int(tensor.storage_offset()),
    )


class OpenedWeights:
    """Weights of another process on the same device, by their place in the model.

    Places with several tensors are left out.
    """

    def __init__(self, text: str, device: torch.device) -> None:
        try:
            message = SharedWeights.model_validate_json(text)
        except ValidationError as error:
            raise EngineError(f"shared weights with an unreadable message: {error}") from error
        if message.device != device_id(device):
            raise EngineError(
                "the engine's weights are on another device than the trainer's",
                expected=device_id(device),
                found=message.device,
                remedy=REMEDY,
            )
        try:
            memories = [open_buffer(handle, device) for handle in message.memories]
        except (RuntimeError, OSError) as refusal:
            raise EngineError(f"the memory of the engine cannot be opened: {refusal}", remedy=REMEDY) from refusal
        self.tensors: dict[str, Tensor] = {}
        uses = Counter(place_of(tensor.name) for tensor in message.tensors)
        for tensor in message.tensors:
            if uses[place := place_of(tensor.name)] == 1:
                self.tensors[place] = _view(memories, tensor)


def _view(memories: list[Tensor], described: SharedTensor) -> Tensor:
    if described.dtype not in DTYPES or described.memory >= len(memories):
        raise EngineError(f"the shared tensor {described.name} has no known type or memory", found=described.dtype)
    dtype, memory = DTYPES[described.dtype], memories[described.memory]
    flat = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    size = math.prod(described.shape)
    if min(described.shape, default=1) < 0 or described.offset + size > flat.numel():
        raise EngineError(f"the shared tensor {described.name} is not within its memory", found=described.shape)
    return flat[described.offset : described.offset + size].view(described.shape)


# ---- bits ------------------------------------------------------------------------------------------------------------


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of a type and shape have the same bits, NaNs and signs of zeros included."""
    kind = _BITS[tensor.dtype.itemsize]
    return torch.equal(tensor.contiguous().view(kind), other.contiguous().view(kind))


@torch.no_grad()
def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a number of each tensor's bits and their order, the same in every process and on every device.

    Two sums of 64 bits that wrap around: what changes without a change of both is not seen, by accident once in 2^64.
    """
    factors: dict[torch.device, Tensor] = {}
    longest = min(_CHUNK, max((tensor.numel() for tensor in tensors.values()), default=0))
    digest_of = {}
    for name, tensor in tensors.items():
        if tensor.device not in factors:
            factors[tensor.device] = torch.arange(1, longest + 1, device=tensor.device) * _FACTOR
        flat = tensor.detach().reshape(-1).view(_BITS[tensor.dtype.itemsize])
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        ordered = torch.zeros_like(total)
        for chunk in flat.split(_CHUNK):
            numbers = chunk.long()
            total += numbers.sum()
            ordered = ordered * _FACTOR + (numbers * factors[tensor.device][: len(numbers)]).sum()
        plain, weighted = torch.stack([total, ordered]).tolist()
        digest_of[name] = f"{plain & (2**64 - 1):016x}{weighted & (2**64 - 1):016x}"
    return digest_of
