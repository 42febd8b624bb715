"""The trainer's memory while the engine samples on the same devices: in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_replay.utils.host_memory import HostMemory

Tensors = Callable[[], Iterable[Tensor]]
"""Tensors of a backend as of now; those of the optimizer come with its first step."""


def no_tensors() -> Iterable[Tensor]:
    return ()


class TrainerOffload:
    """Moves weights to the host while the engine samples; gradients are on the device for updates only, and optimizer
    state for its steps.

    enabled     `backend.offload`; otherwise nothing is ever moved
    weights     parameters of policy and reference, on this rank
    gradients   buffers of zeros between updates; nothing of them is kept
    optimizer   moments, and float32 copies of parameters; what shares memory with weights moves with these
    """

    def __init__(
        self,
        enabled: bool,
        device: torch.device,
        *,
        weights: Tensors,
        optimizer: Tensors,
        gradients: Tensors = no_tensors,
    ) -> None:
        self.enabled = enabled
        self._sources = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        self._memory = {name: HostMemory(device, discard=name == "gradients") for name in self._sources}

    def offload(self) -> None:
        """Move everything to the host."""
        if self.enabled:
            for name, tensors in self._sources.items():  # weights first: the optimizer may step them in place
                self._memory[name].take(map(_local, tensors()))

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
        """Have optimizer state on the device inside this context."""
        self._memory["optimizer"].give_back()
        yield
        self._take_optimizer_state()

    def _take_gradients(self) -> None:
        if self.enabled:
            self._memory["gradients"].take(self._sources["gradients"]())

    def _take_optimizer_state(self) -> None:
        if self.enabled:
            kept = {_local(tensor).untyped_storage()._cdata for tensor in self._sources["weights"]()}
            state = map(_local, self._sources["optimizer"]())
            self._memory["optimizer"].take(t for t in state if t.untyped_storage()._cdata not in kept)

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state that are off the device now."""
        return {name: memory.num_bytes for name, memory in self._memory.items()}

    def content_of(self, tensor: Tensor) -> Tensor:
        """Return the values of this rank's part of a tensor, wherever they are."""
        local = _local(tensor)
        found = (memory.content_of(local) for memory in self._memory.values())
        return next((values for values in found if values is not None), local)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
