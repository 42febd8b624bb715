"""Transfers of experts that are divided among ranks: each rank hands over what it alone holds.

All sending ranks walk through the same groups. A group has one root: the owner of its experts, or rank 0 for what is
gathered. The root writes into the store which chunks follow; then each chunk is sent as rank 0 announces it. With
`nccl`, senders and workers are one group in which the root broadcasts, and the other senders receive one chunk. With
`ipc`, a worker opens the owner's memory where it can; where it cannot (a GPU that its process does not see, another
machine), the rank on its device gets a copy, of the experts of one rank at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from moe_replay.weights.messages import BufferHandle, ChunkMessage
from moe_replay.weights.sender import WeightSender
from moe_replay.weights.source import Group, HandedGroup, TensorInfo
from moe_replay.weights.staging import ALIGNMENT, aligned, copy_all, describe, views
from moe_replay.weights.transfer import BroadcastGroup, end_message

_PLAN = TypeAdapter(list[ChunkMessage])


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
        """Return the ranks that need the tensors of a group."""
        if owner is None:
            return {*self.receivers}
        return {owner, *(self.holder(device, owner) for device in self.readers)}


class DividedSender(WeightSender):
    """One rank's part in a transfer of a `DividedSource`; `groups` are its `owned_groups`."""

    def __init__(self, *args: Any, hand_over: HandOver) -> None:
        super().__init__(*args)
        self._hand_over = hand_over
        self._number = 0

    def _chunks(self) -> Iterator[str]:
        self._wait("ready", self.rendezvous.workers, "engines joined the transfer")
        self._store.put("go", "go")
        yield from self._all_turns()
        yield end_message(self._number)

    def assist(self) -> None:
        """Hand over what this rank holds, in its turns, while rank 0 sends the messages."""
        self._store.wait(lambda: self._store.get("go") is not None, "engines joined the transfer")
        for _ in self._all_turns():
            pass

    def _all_turns(self) -> Iterator[str]:
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
        number = self._number
        if self._rank in holders:
            self._store.add(f"packed/{number}")
        if self._rank == 0:
            self._wait(f"packed/{number}", len(holders), "other ranks filled their buffers")
            readers = self._hand_over.readers
            yield self._message(
                chunk, handles={device: self._handle(self._hand_over.holder(device, owner)) for device in readers}
            )
        if self._rank in holders or self._rank == 0:
            self._read_by_all(number)

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
    """Return the chunks that tensors are sent in, one behind the other; a larger tensor is alone in its chunk."""
    chunks: list[list[TensorInfo]] = []
    room = 0
    for name, tensor in tensors:
        info = TensorInfo.of(name, tensor)
        size = aligned(info.nbytes)
        if not chunks or size > room:
            chunks.append([])
            room = aligned(chunk_bytes)
        chunks[-1].append(info)
        room -= size
    messages = []
    for infos in chunks:
        nbytes = max(ALIGNMENT, sum(aligned(info.nbytes) for info in infos))
        own = {info.name: rows[info.name] for info in infos if info.name in rows}
        messages.append(ChunkMessage(number=0, nbytes=nbytes, capacity=nbytes, tensors=describe(infos), rows=own))
    return messages


def _pack(buffer: Tensor, infos: Sequence[TensorInfo], tensors: Sequence[Tensor]) -> None:
    targets = [view for _, view in views(buffer, infos)]
    copy_all(targets, [tensor.detach() for tensor in tensors])
