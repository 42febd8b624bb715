"""The receiving end of a transfer of weights: one for each worker process of an engine."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_replay.errors import EngineError
from moe_replay.rollout.weights.source import TensorInfo
from moe_replay.rollout.weights.staging import device_id, open_buffer, views
from moe_replay.rollout.weights.transfer import (
    BroadcastGroup,
    Transfer,
    TransferError,
    TransferStore,
)

if TYPE_CHECKING:
    from moe_replay.rollout.weights.transfer_messages import ChunkMessage, TransferSettings


class WeightReceiver:
    """Takes part in one transfer. Constructing it returns when the sender and all workers have joined.

    index    number of this worker in its engine
    device   that the tensors arrive on
    """

    def __init__(self, settings: TransferSettings, index: int, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._worker = settings.first + index
        self._buffer: Tensor | None = None
        self._group: BroadcastGroup | None = None
        self._received = 0
        self._store = TransferStore.connect(settings.host, settings.port, settings.timeout_s)
        self._store.add("ready")
        self._store.wait(lambda: self._store.get("go") is not None, "waiting for other engines")
        if settings.kind == "nccl":
            self._group = BroadcastGroup(self._store, self._worker + 1, settings.workers + 1, device.type)

    def receive(self, text: str) -> list[tuple[str, Tensor]]:
        """Return the tensors of a chunk, which lie in a buffer that the next chunk overwrites.

        They are valid until `acknowledge`.
        """
        from moe_replay.rollout.weights.transfer_messages import read_message

        message = read_message(text)
        if message.number != self._received:
            raise TransferError("a chunk of the weights is missing", expected=self._received, found=message.number)
        infos = message.infos()
        buffer = self._broadcast(message) if self._group is not None else self._opened(message)
        if sum(info.nbytes for info in infos) > message.nbytes or message.nbytes > buffer.numel():
            raise EngineError("the tensors of a chunk do not fit into it", expected=message.nbytes, found=len(infos))
        return views(buffer, infos)

    def _broadcast(self, message: ChunkMessage) -> Tensor:
        if self._buffer is None or self._buffer.numel() < message.capacity:
            self._buffer = None
            self._buffer = torch.empty(message.capacity, dtype=torch.uint8, device=self._device)
        assert self._group is not None
        self._group.broadcast(self._buffer[: message.nbytes])
        return self._buffer

    def _opened(self, message: ChunkMessage) -> Tensor:
        if message.handles:
            own = device_id(self._device)
            if own not in message.handles:
                raise EngineError(
                    "no rank of the trainer has weights on this worker's device",
                    expected=own,
                    found=", ".join(message.handles),
                    remedy='Set weights.kind = "nccl" or "http"',
                )
            self._buffer = None
            self._buffer = open_buffer(message.handles[own], self._device)
        if self._buffer is None:
            raise TransferError("a chunk without its buffer")
        return self._buffer

    def acknowledge(self) -> None:
        """Tell the sender that the tensors of the last chunk have been read."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._store.add(f"done/{self._received}")
        self._received += 1

    def fail(self, text: str, *, lost: bool = False) -> None:
        """Fail the transfer for the sender and all workers, and leave it.

        lost   the cause is elsewhere: the transfer has broken off
        """
        try:
            self._store.fail(text, None if lost else self._worker)
        except TransferError:
            return  # the sender is gone
        finally:
            self.close()

    def close(self) -> None:
        """Leave the transfer and free the buffer."""
        self._buffer = None
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


def received_tensors(transfer: Transfer, device: torch.device) -> Generator[tuple[str, Tensor]]:
    """Yield the tensors of a transfer to an engine whose only worker is this process; each is the caller's to keep."""
    receiver = WeightReceiver(transfer.for_engine(""), 0, device)
    lost = whole = False
    try:
        messages = transfer.chunk_messages()
        while True:
            lost = True  # whatever fails while messages are read has failed elsewhere
            message = next(messages, None)
            if message is None:
                break
            chunk = [(name, tensor.clone()) for name, tensor in receiver.receive(message)]
            receiver.acknowledge()
            lost = False
            yield from chunk
        whole = True
    finally:
        if not whole:
            receiver.fail("an engine could not load the weights", lost=lost)
    receiver.close()


def describe(infos: list[TensorInfo]) -> list[tuple[str, str, list[int]]]:
    """Return tensors as messages name them."""
    return [(info.name, str(info.dtype).removeprefix("torch."), list(info.shape)) for info in infos]
