"""Staging buffers of a weight transfer: one that each sending rank fills chunk by chunk, and the receiver of a worker.

With `ipc` the other process opens the buffer: by CUDA's handle on a GPU, by mapping the same file in memory on a CPU. A
handle consists of plain fields; nothing is pickled.
"""

from __future__ import annotations

import base64
import math
import os
import platform
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_replay.errors import EngineError
from moe_replay.weights.source import Group, TensorInfo
from moe_replay.weights.transfer import BroadcastGroup, Transfer, TransferError, TransferStore

if TYPE_CHECKING:
    from moe_replay.weights.messages import BufferHandle, ChunkMessage, TransferSettings

ALIGNMENT = 256
_FILE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


def device_id(device: torch.device) -> str:
    """Return an id that is the same in every process: the UUID of a GPU, the boot id of the machine for a CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
            return f"{platform.node()} {boot.read().strip()}"
    except OSError:
        return platform.node()


def openable_devices(device: torch.device) -> list[str]:
    """Return the ids of the devices whose memory a process on this one can open: GPUs that it sees and reads directly.

    On a CPU, the machine.
    """
    if device.type != "cuda":
        return [device_id(device)]
    index = torch.cuda.current_device() if device.index is None else device.index
    others = range(torch.cuda.device_count())
    openable = [peer for peer in others if peer == index or torch.cuda.can_device_access_peer(index, peer)]
    return [device_id(torch.device("cuda", peer)) for peer in openable]


class StagingBuffer:
    """A buffer of bytes on a device.

    shared   another process will open it
    """

    def __init__(self, device: torch.device, nbytes: int, *, shared: bool) -> None:
        self.nbytes = nbytes
        self._file: int | None = None
        if shared and device.type == "cpu":
            self._file = os.memfd_create("moe-replay weights")
            os.ftruncate(self._file, nbytes)
            self.bytes = torch.from_file(f"/proc/self/fd/{self._file}", shared=True, size=nbytes, dtype=torch.uint8)
        else:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def handle(self) -> BufferHandle:
        """Return what another process opens the buffer with."""
        from moe_replay.weights.messages import BufferHandle

        if self._file is not None:
            return BufferHandle(nbytes=self.nbytes, file=f"/proc/{os.getpid()}/fd/{self._file}")
        return storage_handle(self.bytes.untyped_storage())

    def close(self) -> None:
        """Free the memory; a process that has it open keeps it until it closes it."""
        self.bytes = self.bytes.new_empty(0)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def storage_handle(storage: Any) -> BufferHandle:
    """Return what another process opens memory of a GPU with; this one must keep it."""
    from moe_replay.weights.messages import BufferHandle

    _, memory, size, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    return BufferHandle(
        nbytes=storage.nbytes(),
        memory=_text(memory),
        storage_bytes=size,
        storage_offset=offset,
        counter=_text(counter),
        counter_offset=counter_offset,
        event=_text(event),
        event_sync=event_sync,
    )


def open_buffer(handle: BufferHandle, device: torch.device) -> Tensor:
    """Return the buffer (nbytes,) uint8 of another process."""
    if handle.file:
        if not _FILE.fullmatch(handle.file):
            raise EngineError("weights in a file that is not one in memory", found=handle.file)
        return torch.from_file(handle.file, shared=True, size=handle.nbytes, dtype=torch.uint8)
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    storage: Any = torch.UntypedStorage._new_shared_cuda(
        index,
        _bytes(handle.memory),
        handle.storage_bytes,
        handle.storage_offset,
        _bytes(handle.counter),
        handle.counter_offset,
        _bytes(handle.event),
        handle.event_sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (handle.nbytes,), (1,))


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


# ---- tensors in a buffer --------------------------------------------------------------------------------------------


def aligned(nbytes: int) -> int:
    """Return the bytes that a tensor of this size takes up in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def views(buffer: Tensor, infos: Iterable[TensorInfo]) -> list[tuple[str, Tensor]]:
    """Return the tensors that lie in a buffer one after the other."""
    tensors, offset, typed = [], 0, _TypedViews(buffer)
    for info in infos:
        tensors.append((info.name, typed.at(offset, info)))
        offset += aligned(info.nbytes)
    return tensors


class _TypedViews:
    """Tensors in a buffer of bytes, each made by one operation: there are thousands of them in a chunk."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer[: buffer.numel() // ALIGNMENT * ALIGNMENT]
        self._typed: dict[torch.dtype, Tensor] = {}

    def at(self, offset: int, info: TensorInfo) -> Tensor:
        """Return the tensor that begins at an aligned offset."""
        typed = self._typed.get(info.dtype)
        if typed is None:
            typed = self._typed[info.dtype] = self._buffer.view(info.dtype)
        return typed.as_strided(info.shape, _strides(info.shape), offset // info.dtype.itemsize)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def fill(groups: Iterator[Group], get_buffer: Callable[[int], Tensor], chunk_bytes: int) -> Iterator[list[TensorInfo]]:
    """Copy all groups into a buffer, one tensor after another; yield what is in it whenever it is full.

    get_buffer    returns a buffer of at least the given bytes; called when the last content has been sent
    chunk_bytes   size of a buffer; a larger tensor gets its own buffer
    """
    infos: list[TensorInfo] = []
    buffer, typed, offset = None, None, 0
    for group in groups:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, tensor in group:
            info = TensorInfo.of(name, tensor)
            size = aligned(info.nbytes)
            if buffer is None or typed is None or offset + size > buffer.numel():
                copy_all(targets, sources)
                targets, sources = [], []
                if infos:
                    yield infos
                infos, offset = [], 0
                buffer = get_buffer(max(size, aligned(chunk_bytes)))
                typed = _TypedViews(buffer)
            targets.append(typed.at(offset, info))
            sources.append(tensor.detach())
            infos.append(info)
            offset += size
        copy_all(targets, sources)
        del targets, sources, group  # the next one may take their memory
    if infos:
        yield infos


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors in as few kernels as their types allow."""
    by_type: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = by_type.setdefault((target.dtype, source.dtype, source.device), ([], []))
        into.append(target)
        out_of.append(source)
    with torch.no_grad():
        for into, out_of in by_type.values():
            torch._foreach_copy_(into, out_of, non_blocking=into[0].device == out_of[0].device)


# ---- the receiving end -----------------------------------------------------------------------------------------------


class WeightReceiver:
    """Takes part in one transfer. Constructing it returns when the sender and all workers have joined.

    index    number of this worker in its engine
    device   that the tensors arrive on
    """

    def __init__(self, settings: TransferSettings, index: int, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._worker = settings.first + index
        self._buffer: Tensor | None = None
        self._opened_of: dict[int, tuple[BufferHandle, Tensor]] = {}  # buffers of ranks
        self._whole: dict[str, tuple[Tensor, int]] = {}  # of tensors that come by rows, and the rows that are missing
        self._group: BroadcastGroup | None = None
        self._received = 0
        self._store = TransferStore.connect(settings.host, settings.port, settings.token, settings.timeout_s)
        self._store.add("ready")
        self._store.wait(lambda: self._store.get("go") is not None, "waiting for other engines")
        if settings.kind == "nccl":
            place, size = settings.senders + self._worker, settings.senders + settings.workers
            self._group = BroadcastGroup(self._store, place, size, device.type)

    def receive(self, text: str) -> list[tuple[str, Tensor]]:
        """Return the tensors of a chunk, which lie in a buffer that the next chunk overwrites.

        They are valid until `acknowledge`. A tensor that comes by rows is returned with the chunk that has the last.
        """
        from moe_replay.weights.messages import read_message

        message = read_message(text)
        if message.number != self._received:
            raise TransferError("a chunk of the weights is missing", expected=self._received, found=message.number)
        infos = message.infos()
        buffer = self._broadcast(message) if self._group is not None else self._opened(message)
        if sum(info.nbytes for info in infos) > message.nbytes or message.nbytes > buffer.numel():
            raise EngineError("the tensors of a chunk do not fit into it", expected=message.nbytes, found=len(infos))
        return [whole for item in views(buffer, infos) for whole in self._assembled(*item, message.rows)]

    def _assembled(self, name: str, tensor: Tensor, rows: Mapping[str, tuple[int, int]]) -> list[tuple[str, Tensor]]:
        """Return a tensor if all of it is there."""
        if name not in rows:
            return [(name, tensor)]
        first, total = rows[name]
        if name not in self._whole:
            self._whole[name] = torch.empty((total, *tensor.shape[1:]), dtype=tensor.dtype, device=self._device), total
        whole, missing = self._whole.pop(name)
        if len(tensor) > missing or first + len(tensor) > total:
            raise EngineError(f"more rows of {name} than it has", expected=total, found=first + len(tensor))
        whole[first : first + len(tensor)] = tensor
        if missing == len(tensor):
            return [(name, whole)]
        self._whole[name] = whole, missing - len(tensor)
        return []

    def _broadcast(self, message: ChunkMessage) -> Tensor:
        if self._buffer is None or self._buffer.numel() < message.capacity:
            self._buffer = None
            self._buffer = torch.empty(message.capacity, dtype=torch.uint8, device=self._device)
        assert self._group is not None
        self._group.broadcast(self._buffer[: message.nbytes], root=message.root)
        return self._buffer

    def _opened(self, message: ChunkMessage) -> Tensor:
        if message.handles:
            device = device_id(self._device)
            if device not in message.handles:
                raise EngineError(
                    "no rank of the trainer has weights on this worker's device",
                    expected=device,
                    found=", ".join(message.handles),
                    remedy='Set weight_sync.transport = "nccl" or "http"',
                )
            handle = message.handles[device]
            self._buffer = None
            if handle.rank not in self._opened_of or self._opened_of[handle.rank][0] != handle:
                self._opened_of.pop(handle.rank, None)  # before the next one is opened
                self._opened_of[handle.rank] = handle, open_buffer(handle, self._device)
            self._buffer = self._opened_of[handle.rank][1]
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
        self._opened_of, self._whole = {}, {}
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
            lost = True  # a failure while messages are read happened elsewhere
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
