"""The trainer's memory while the engine samples on the same devices: in host memory, where tensors move in place.

Every tensor and every view of it stays the same object.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

Tensors = Callable[[], Iterable[Tensor]]
"""Current tensors of a backend; those of the optimizer come with its first step."""
_ALIGNMENT = 256


class _Block(NamedTuple):
    """A storage and the bytes of host memory that hold its content."""

    storage: UntypedStorage
    start: int
    size: int


class HostMemory:
    """Moves the memory of tensors on one device to the host. The host memory is pinned, and kept for the next time.

    device    tensors elsewhere are left alone
    discard   keep no content: the tensors come back as zeros
    """

    def __init__(self, device: torch.device, *, discard: bool = False) -> None:
        self._device, self._discard = device, discard
        self._blocks: dict[int, _Block] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Move the memory of these tensors away from the device; memory that several share is moved once."""
        taken, end = dict(self._blocks), self._end
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes() and storage._cdata not in taken:
                taken[storage._cdata] = _Block(storage, end, storage.nbytes())
                end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        new = [block for key, block in taken.items() if key not in self._blocks]
        if not new:
            return
        if not self._discard:
            self._reserve(end)
            for block in new:
                self._content(block).copy_(_bytes_of(block.storage), non_blocking=True)
        self._synchronize()
        self._blocks = taken
        for block in new:
            block.storage.resize_(0)
        self._release_cached_memory()

    def give_back(self) -> None:
        for block in self._blocks.values():
            block.storage.resize_(block.size)
            content = _bytes_of(block.storage)
            if self._discard:
                content.zero_()
            else:
                content.copy_(self._content(block), non_blocking=True)
        if self._blocks:
            self._synchronize()
        self._blocks = {}

    def content_of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor that is away, as a tensor on the host; None if it is not away."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None or self._discard:
            return None
        values = self._content(block).view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride(), values.storage_offset() + tensor.storage_offset())

    # ---- host memory --------------------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return max((block.start + block.size for block in self._blocks.values()), default=0)

    def _content(self, block: _Block) -> Tensor:
        return self._memory[block.start : block.start + block.size]

    def _reserve(self, size: int) -> None:
        if size <= len(self._memory):
            return
        memory = _pinned(size, self._device)
        memory[: len(self._memory)].copy_(self._memory)
        self._memory = memory

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()

    def _release_cached_memory(self) -> None:
        """Return freed memory to the device, for other processes."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(size: int, device: torch.device) -> Tensor:
    """Return host memory that the device copies from and to at full speed, if the system allows it."""
    memory = torch.empty(size, dtype=torch.uint8)
    if device.type == "cuda":
        # torch's allocator of pinned memory would round up to a power of two.
        runtime: Any = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)):
            logger.warning("%.1f GiB of host memory could not be pinned: copies to it are slower", size / 2**30)
        else:
            weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory


class TrainerOffload:
    """Moves weights to the host while the engine samples; gradients are on the device for updates only, and optimizer
    state for its steps.

    enabled     `backend.offload`; otherwise nothing is ever moved
    weights     parameters of policy and reference, on this rank
    gradients   buffers of zeros between updates; nothing of them is kept
    optimizer   moments, and float32 copies of parameters; what shares memory with weights moves with these
    """

    def __init__(
        self, enabled: bool, device: torch.device, *, weights: Tensors, optimizer: Tensors, gradients: Tensors = tuple
    ) -> None:
        self.enabled = enabled
        self._sources = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        self._memory = {name: HostMemory(device, discard=name == "gradients") for name in self._sources}

    def offload(self) -> None:
        if self.enabled:
            for name, tensors in self._sources.items():  # weights first: the optimizer may step them in place
                self._memory[name].take(map(local_part, tensors()))

    def reload(self) -> None:
        """Move weights back; the rest stays on the host until it is needed."""
        self._memory["weights"].give_back()
        self._take_optimizer_state()
        self._take_gradients()

    @contextmanager
    def gradients_on_device(self) -> Iterator[None]:
        """Have gradients on the device inside this context, where they begin and end as zeros."""
        self._memory["gradients"].give_back()
        yield
        self._take_gradients()

    @contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        self._memory["optimizer"].give_back()
        yield
        self._take_optimizer_state()

    def _take_gradients(self) -> None:
        if self.enabled:
            self._memory["gradients"].take(self._sources["gradients"]())

    def _take_optimizer_state(self) -> None:
        if self.enabled:
            kept = {local_part(tensor).untyped_storage()._cdata for tensor in self._sources["weights"]()}
            state = map(local_part, self._sources["optimizer"]())
            self._memory["optimizer"].take(t for t in state if t.untyped_storage()._cdata not in kept)

    def content_of(self, tensor: Tensor) -> Tensor:
        """Return the values of this rank's part of a tensor, wherever they are."""
        local = local_part(tensor)
        contents = (memory.content_of(local) for memory in self._memory.values())
        return next((values for values in contents if values is not None), local)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
