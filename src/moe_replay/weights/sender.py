"""The sending end of a weight transfer: one rank's part in it.

Usually one rank sends. Experts that are divided among ranks are handed over by each rank that holds them
(`DividedSender`): all sending ranks walk through the same groups. A group has one root: the owner of its experts, or
rank 0 for what is gathered. The root writes into the store which chunks follow; then each chunk is sent as rank 0
announces it. With `nccl`, senders and workers are one group in which the root broadcasts, and the other senders receive
one chunk. With `ipc`, a worker opens the owner's memory where it can; where it cannot (a GPU that its process does not
see, another machine), the rank on its device gets a copy, of the experts of one rank at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from moe_replay.errors import MoeReplayError
from moe_replay.utils.misc import one_line
from moe_replay.weights.messages import BufferHandle, ChunkMessage, TransferKind, TransferSettings
from moe_replay.weights.source import Group, HandedGroup, TensorInfo
from moe_replay.weights.staging import ALIGNMENT, StagingBuffer, aligned, copy_all, describe, device_id, fill, views
from moe_replay.weights.transfer import BroadcastGroup, Receivers, Transfer, TransferError, TransferStore, end_message

_PLAN = TypeAdapter(list[ChunkMessage])


class Rendezvous(NamedTuple):
    """Rendezvous of the trainer's ranks and the engines' workers for one transfer.

    token   that everyone who takes part has
    ranks   of the trainer that hand weights over, rank 0 first
    """

    kind: TransferKind
    host: str
    port: int
    token: str
    ranks: tuple[int, ...]
    workers: int
    chunk_bytes: int
    timeout_s: float


class WeightSender:
    """One rank's part in one transfer.

    groups   the weights on this rank, as `WeightSource.groups` yields them for the ranks of the rendezvous
    store    of the rendezvous, on rank 0, which holds it; other ranks connect
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        device: torch.device,
        groups: Iterator[Group],
        store: TransferStore | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self.bytes_sent = 0
        self._number = 0  # of the next chunk
        self._rank, self._device, self._groups = rank, device, groups
        self._store = store or TransferStore.connect(
            rendezvous.host, rendezvous.port, rendezvous.token, rendezvous.timeout_s
        )
        self._buffer: StagingBuffer | None = None
        self._buffers = self._announced = 0  # so far, and of which the engines know
        self._group: BroadcastGroup | None = None
        self._check: Callable[[], None] | None = None
        self._urls: list[str] = []  # of the engine of each worker
        self._open: Generator[str] | None = None

    # ---- rank 0 -------------------------------------------------------------------------------------------------

    def transfer(self, engines: Mapping[str, Receivers], hosts: Mapping[str, str] | None = None) -> Transfer:
        """Return the transfer for the engines' `receive_weights`; its messages must be read in this thread. On rank 0.

        hosts   address of this machine as each engine sees it, where that is not the rendezvous's
        """
        settings, first = {}, 0
        rendezvous = self.rendezvous
        for url, receivers in engines.items():
            settings[url] = TransferSettings(
                kind=rendezvous.kind,
                host=(hosts or {}).get(url, rendezvous.host),
                port=rendezvous.port,
                token=rendezvous.token,
                first=first,
                workers=rendezvous.workers,
                timeout_s=rendezvous.timeout_s,
                senders=len(rendezvous.ranks),
            )
            self._urls += [url] * len(receivers.ids)
            first += len(receivers.ids)
        transfer = Transfer(settings, ())
        self._check = lambda: _check_running(transfer)
        transfer.messages = self._open = self._messages()
        return transfer

    def _messages(self) -> Generator[str]:
        try:
            self._wait("ready", self.rendezvous.workers, "engines joined the transfer")
            self._store.put("go", "go")
            yield from self._chunks()
            yield end_message(self._number)
        except MoeReplayError as failure:
            with suppress(TransferError):
                self._store.fail(one_line(failure))  # before engines hear of it in another way
            raise

    # ---- other ranks --------------------------------------------------------------------------------------------

    def assist(self) -> None:
        """Hand over what this rank has of each chunk while rank 0 sends the messages."""
        for _ in self._chunks():
            pass

    # ---- both ---------------------------------------------------------------------------------------------------

    def _chunks(self) -> Iterator[str]:
        """Hand over all chunks; on rank 0, yield the message of each."""
        rendezvous = self.rendezvous
        if rendezvous.kind == "nccl":
            self._group = BroadcastGroup(self._store, 0, rendezvous.workers + 1, self._device.type, check=self._check)
        for infos in fill(self._groups, self._room, rendezvous.chunk_bytes):
            handles = self._packed()
            assert self._buffer is not None
            buffer = self._buffer.bytes
            nbytes = sum(aligned(info.nbytes) for info in infos)
            if self._rank == 0:
                tensors, capacity = describe(infos), buffer.numel()
                yield ChunkMessage(
                    number=self._number, nbytes=nbytes, capacity=capacity, tensors=tensors, handles=handles
                ).model_dump_json(exclude_defaults=True)
            if self._group is not None:
                self._group.broadcast(buffer[:nbytes], self._check)
            else:
                self._read_by_all()
            self._number += 1
            self.bytes_sent += sum(info.nbytes for info in infos)

    def _room(self, nbytes: int) -> Tensor:
        """Return the buffer, replaced if it is too small."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = StagingBuffer(self._device, nbytes, shared=self.rendezvous.kind == "ipc")
            if self.rendezvous.kind == "ipc":
                self._put_handle(self._buffer.handle())
            self._buffers += 1
        return self._buffer.bytes

    def _put_handle(self, handle: BufferHandle) -> None:
        text = f"{device_id(self._device)}\n{handle.model_dump_json()}"
        self._store.put(f"handle/{self._buffers}/{self._rank}", text)

    def _packed(self) -> dict[str, BufferHandle]:
        """Wait until every rank has filled its buffer; return the handles on rank 0 if they are new."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self.rendezvous.kind != "ipc":
            return {}
        self._store.add(f"packed/{self._number}")
        if self._rank != 0:
            return {}
        self._wait(f"packed/{self._number}", len(self.rendezvous.ranks), "other ranks filled their buffers")
        if self._announced == self._buffers:
            return {}
        self._announced = self._buffers
        handles = [self._store.get(f"handle/{self._buffers - 1}/{rank}") for rank in self.rendezvous.ranks]
        parts = [text.partition("\n") for text in handles if text is not None]
        return {device: BufferHandle.model_validate_json(handle) for device, _, handle in parts}

    def _read_by_all(self) -> None:
        """Wait until every worker has loaded the chunk: the buffer is overwritten next."""
        self._wait(f"done/{self._number}", self.rendezvous.workers, "engines loaded weights")

    def _wait(self, key: str, count: int, doing: str) -> None:
        self._store.wait(lambda: self._store.add(key, 0) >= count, doing, self._check)

    def failed_engines(self) -> set[str]:
        """Return the engine whose worker ended the transfer, if one did."""
        with suppress(TransferError):
            failure = self._store.failure()
            if failure is not None and failure["worker"] is not None and self._urls:
                return {self._urls[failure["worker"]]}
        return set()

    def fail(self, text: str) -> None:
        """Fail the transfer for all workers, and leave it."""
        with suppress(TransferError):  # rank 0 is gone
            self._store.fail(text)
        self.close()

    def close(self) -> None:
        """Free the buffer and leave."""
        # Nobody reads on after the last message, so the generator still refers to the buffer, and is part of a cycle:
        # without this the memory of every update would be kept until Python collects garbage.
        if self._open is not None and inspect.getgeneratorstate(self._open) != inspect.GEN_RUNNING:
            self._open.close()
        self._open = self._check = None
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()


def _check_running(transfer: Transfer) -> None:
    """Raise if an engine has ended its update before the last message."""
    ended = transfer.ended()
    if ended:
        raise TransferError("; ".join(f"{url or 'the engine'}: {why}" for url, why in ended.items()))


# ---- divided experts -------------------------------------------------------------------------------------------------


class HandOver(NamedTuple):
    """From which rank each worker gets what one rank holds.

    receivers   ranks that have what is gathered
    readers     with `ipc`: the rank on the device of each worker, by device; empty with `nccl`
    opened      owners whose memory the worker on each device opens
    """

    receivers: tuple[int, ...]
    readers: Mapping[str, int]
    opened: Mapping[str, frozenset[int]]

    @classmethod
    def between(
        cls, devices: Sequence[str], opens: Mapping[str, Sequence[str]], receivers: tuple[int, ...]
    ) -> HandOver:
        """Return it for ranks on these devices and workers that open some of them, by their own device."""
        readers = {name: devices.index(name) for name in opens}
        opened = {
            name: frozenset(rank for rank, device in enumerate(devices) if device in others)
            for name, others in opens.items()
        }
        return cls(receivers, readers, opened)

    def holder(self, device: str, owner: int | None) -> int:
        """Return the rank whose memory the worker on a device reads."""
        return owner if owner is not None and owner in self.opened[device] else self.readers[device]

    def holders(self, owner: int | None) -> set[int]:
        if owner is None:
            return {*self.receivers}
        return {owner, *(self.holder(device, owner) for device in self.readers)}


class DividedSender(WeightSender):
    """One rank's part in a transfer of a `DividedSource`; `groups` are its `owned_groups`."""

    def __init__(self, *args: Any, hand_over: HandOver) -> None:
        super().__init__(*args)
        self._hand_over = hand_over

    def assist(self) -> None:
        self._store.wait(lambda: self._store.get("go") is not None, "engines joined the transfer")
        super().assist()

    def _chunks(self) -> Iterator[str]:
        rendezvous = self.rendezvous
        if rendezvous.kind == "nccl":
            place, size = rendezvous.ranks.index(self._rank), len(rendezvous.ranks) + rendezvous.workers
            self._group = BroadcastGroup(self._store, place, size, self._device.type, check=self._check)
        for turn, handed in enumerate(self._groups):
            assert isinstance(handed, HandedGroup)
            yield from self._turn(turn, handed)

    def _turn(self, turn: int, handed: HandedGroup) -> Iterator[str]:
        """Send the chunks of one group; yield a message for each, on rank 0."""
        root = 0 if handed.owner is None else handed.owner
        holders = self._hand_over.holders(handed.owner)
        tensors = iter(handed.tensors)
        for chunk in self._plan(turn, root, handed):
            infos = chunk.infos()
            takes_part = self._rank in holders or self._group is not None
            buffer = self._room(chunk.nbytes) if takes_part else torch.empty(0)
            if self._rank in holders:
                _pack(buffer, infos, [tensor for _, (_, tensor) in zip(infos, tensors, strict=False)])
            if self._device.type == "cuda":  # of the gathering too: its streams and the broadcast's are different ones
                torch.cuda.current_stream(self._device).synchronize()
            if self._group is None:
                yield from self._opened_by_workers(chunk, handed.owner, holders)
            else:
                if self._rank == 0:
                    place = self.rendezvous.ranks.index(root)
                    yield self._message(chunk, root=place)
                self._group.broadcast(buffer[: chunk.nbytes], self._check, self.rendezvous.ranks.index(root))
            self._number += 1
            if self._rank in holders or self._rank == 0:
                self.bytes_sent += sum(info.nbytes for info in infos)

    def _opened_by_workers(self, chunk: ChunkMessage, owner: int | None, holders: set[int]) -> Iterator[str]:
        """Wait until the workers have read a chunk from the memory of its holders."""
        if self._rank in holders:
            self._store.add(f"packed/{self._number}")
        if self._rank == 0:
            self._wait(f"packed/{self._number}", len(holders), "other ranks filled their buffers")
            readers = self._hand_over.readers
            yield self._message(
                chunk, handles={device: self._handle(self._hand_over.holder(device, owner)) for device in readers}
            )
        if self._rank in holders or self._rank == 0:
            self._read_by_all()

    def _message(self, chunk: ChunkMessage, **fields: Any) -> str:
        return chunk.model_copy(update={"number": self._number, **fields}).model_dump_json(exclude_defaults=True)

    def _plan(self, turn: int, root: int, handed: HandedGroup) -> list[ChunkMessage]:
        """Return the chunks of a group, as its root has planned them."""
        key = f"plan/{turn}"
        if self._rank == root:
            plan = planned(handed.tensors, handed.rows, self.rendezvous.chunk_bytes)
            self._store.put(key, _PLAN.dump_json(plan, exclude_defaults=True).decode())
            return plan
        self._store.wait(lambda: self._store.get(key) is not None, f"rank {root} gathered weights", self._check)
        return _PLAN.validate_json(self._store.get(key) or "")

    def _put_handle(self, handle: BufferHandle) -> None:
        handle.rank = self._rank
        self._store.put(f"handle/{self._rank}", handle.model_dump_json())

    def _handle(self, rank: int) -> BufferHandle:
        return BufferHandle.model_validate_json(self._store.get(f"handle/{rank}") or "")


def planned(tensors: Group, rows: Mapping[str, tuple[int, int]], chunk_bytes: int) -> list[ChunkMessage]:
    """Return the chunks that tensors are sent in, one after another; a larger tensor is alone in its chunk."""
    chunks: list[list[TensorInfo]] = []
    free_bytes = 0
    for name, tensor in tensors:
        info = TensorInfo.of(name, tensor)
        size = aligned(info.nbytes)
        if not chunks or size > free_bytes:
            chunks.append([])
            free_bytes = aligned(chunk_bytes)
        chunks[-1].append(info)
        free_bytes -= size
    messages = []
    for infos in chunks:
        nbytes = max(ALIGNMENT, sum(aligned(info.nbytes) for info in infos))
        chunk_rows = {info.name: rows[info.name] for info in infos if info.name in rows}
        messages.append(
            ChunkMessage(number=0, nbytes=nbytes, capacity=nbytes, tensors=describe(infos), rows=chunk_rows)
        )
    return messages


def _pack(buffer: Tensor, infos: Sequence[TensorInfo], tensors: Sequence[Tensor]) -> None:
    targets = [view for _, view in views(buffer, infos)]
    copy_all(targets, [tensor.detach() for tensor in tensors])
