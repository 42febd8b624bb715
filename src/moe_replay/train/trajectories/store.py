"""Stores that keep the trajectories of a step until the ranks that train on them fetch them.

    batch = store.put(trajectories)                    # where they arrive: on rank 0
    store.get(batch, indices=[3, 5], layers=(4, 5))    # on any rank: its own sequences, the layers of its stage

`InProcessStore` is for one rank, `RankStore` for several: rank 0 encodes the trajectories once for each pipeline stage
in an anonymous file in memory. Ranks on its machine map it; on other machines one of the ranks that need the same
trajectories fetches them over a socket, and the others map its copy.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from moe_replay.distributed.collectives import control_group
from moe_replay.distributed.network import admitted, machine_id, open_rank_server, receive_into
from moe_replay.distributed.ranks import all_gather_json, rank
from moe_replay.errors import AlignmentError, ExitStatus, MoeReplayError
from moe_replay.records import Layers, RolloutBatch, Trajectory
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.trajectories.wire import (
    header_of,
    read_record,
    read_section,
    read_table,
    stored_parts,
    table,
    table_bytes,
)
from moe_replay.utils.files import anonymous_file, write_at
from moe_replay.utils.misc import one_line

LENGTH = struct.Struct("<Q")
THREADS = 32
_REQUEST_BYTES = 2**26


class StoreError(MoeReplayError):
    """Trajectories that could not be read from the rank that holds them."""

    exit_status = ExitStatus.FAILED


class TrajectoryStore(Protocol):
    """Store interface of the training loop."""

    received_bytes: int

    @property
    def layer_sets(self) -> Sequence[Layers | None]:
        """Sets of layers that trajectories are encoded for, one for each pipeline stage; None: all of them."""

    def put(self, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Keep the trajectories of a step, and no longer those of the step before."""

    def get(self, batch: RolloutBatch, indices: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories, in this order, with the routes of at least these layers."""

    def whole(self, batch: RolloutBatch, indices: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of all layers; where they were put."""

    def close(self) -> None:
        """Free everything."""


class InProcessStore:
    """The trajectories themselves, for one rank."""

    layer_sets: Sequence[Layers | None] = (None,)

    def __init__(self) -> None:
        self.received_bytes = 0
        self._trajectories: Sequence[Trajectory] = ()
        self._number = 0

    def put(self, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        self._trajectories = trajectories
        self._number += 1
        layers = trajectories[0].layers if trajectories else ()
        return RolloutBatch(headers=list(map(header_of, trajectories)), layers=layers, number=self._number)

    def get(self, batch: RolloutBatch, indices: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        return self.whole(batch, indices)

    def whole(self, batch: RolloutBatch, indices: Sequence[int]) -> list[Trajectory]:
        assert batch.number == self._number, "the trajectories of an earlier step are not kept"
        return [_with_routes(self._trajectories[index]) for index in indices]

    def close(self) -> None:
        self._trajectories = ()


class _RankLocation(NamedTuple):
    """Location of a rank and the data that it trains on; ranks of one machine with the same data share a copy."""

    pid: int
    machine: str
    data_rank: int
    layers: Layers


class RankStore:
    """The store of a job of several ranks, with the trajectories on rank 0. All ranks open it, and call `get` together.

    received_bytes   that `get` has returned on this rank: mapped, or read from a socket
    """

    def __init__(self, data_rank: int, layers: Layers, timeout_s: float, machine: str | None = None) -> None:
        self._own = _RankLocation(os.getpid(), machine_id() if machine is None else machine, data_rank, layers)
        self._locations = [
            _RankLocation(pid, where, share, tuple(layers_of_rank))
            for pid, where, share, layers_of_rank in all_gather_json(self._own)
        ]
        self._sets = sorted({location.layers for location in self._locations})
        self._timeout_s = timeout_s
        self._file = -1
        self._number = 0
        self.received_bytes = 0
        server = open_rank_server([location.machine for location in self._locations], "serving trajectories")
        self._host, self._port, self._token = server.host, server.port, server.token
        self._server = SectionServer(server.listener, server.token, timeout_s) if server.listener else None

    @property
    def sent_bytes(self) -> int:
        """Bytes that rank 0 has sent to other machines."""
        return 0 if self._server is None else self._server.sent_bytes

    # ---- on rank 0 ----------------------------------------------------------------------------------------------

    @property
    def layer_sets(self) -> Sequence[Layers | None]:
        return self._sets

    def put(self, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Encode the trajectories of a step, once for each pipeline stage; on rank 0."""
        layers = _common_layers(trajectories)
        self._forget()
        self._file = anonymous_file()
        end, sections = 0, []
        for stage in self._sets:
            start, end = end, end + table_bytes(len(trajectories))
            offsets = [end - start]
            for trajectory in trajectories:
                end += write_at(self._file, end, stored_parts(trajectory, stage))
                offsets.append(end - start)
            write_at(self._file, start, [memoryview(table(offsets))])
            sections.append((start, end - start))
        self._number += 1
        if self._server is not None:
            self._server.offer = Offer(self._number, self._file, tuple(sections))
        return RolloutBatch(
            headers=list(map(header_of, trajectories)),
            layers=layers,
            number=self._number,
            file=self._file,
            sections=tuple(sections),
        )

    def whole(self, batch: RolloutBatch, indices: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of all layers; on rank 0."""
        return _merge_layers([_read(self._file, section, indices)[0] for section in batch.sections])

    # ---- on any rank --------------------------------------------------------------------------------------------

    def get(self, batch: RolloutBatch, indices: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of this rank's layers. All ranks call it."""
        assert tuple(layers) == self._own.layers, "a rank has the layers that it opened the store with"
        chosen, first = self._sets.index(self._own.layers), self._locations[0]
        if rank() == 0:
            return self._counted(self._file, batch.sections[chosen], indices)
        if self._own.machine and self._own.machine == first.machine:
            mapped = self._map(first.pid, batch.file, batch.sections[chosen], indices)
            return self._fetch_alone(batch, chosen, indices) if mapped is None else mapped
        return self._fetch_together(batch, chosen, indices)

    def _fetch_together(self, batch: RolloutBatch, chosen: int, indices: Sequence[int]) -> list[Trajectory]:
        """Fetch trajectories once for all ranks of this machine that ask for the same."""
        sharing = [other_rank for other_rank, location in enumerate(self._locations) if location[1:] == self._own[1:]]
        if not self._own.machine:
            sharing = [rank()]
        location = torch.zeros(2, dtype=torch.int64)
        if rank() != sharing[0]:
            dist.recv(location, sharing[0], group=control_group())
            file, size = location.tolist()
            mapped = self._map(self._locations[sharing[0]].pid, file, (0, size), range(len(indices)))
            return self._fetch_alone(batch, chosen, indices) if mapped is None else mapped
        trajectories = self._fetch_alone(batch, chosen, indices)
        location[0], location[1] = self._file, os.fstat(self._file).st_size
        for peer in sharing[1:]:
            dist.send(location, peer, group=control_group())
        return trajectories

    def _fetch_alone(self, batch: RolloutBatch, chosen: int, indices: Sequence[int]) -> list[Trajectory]:
        self._forget()
        self._file = self._fetch(batch, chosen, indices)
        return self._counted(self._file, (0, os.fstat(self._file).st_size), range(len(indices)))

    def _map(self, pid: int, file: int, section: tuple[int, int], indices: Sequence[int]) -> list[Trajectory] | None:
        """Return trajectories from a file of another process; None if that is not allowed here."""
        try:
            opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY)
        except OSError:
            return None
        try:
            return self._counted(opened, section, indices)
        finally:
            os.close(opened)

    def _counted(self, file: int, section: tuple[int, int], indices: Sequence[int]) -> list[Trajectory]:
        trajectories, size = _read(file, section, indices)
        self.received_bytes += size
        return trajectories

    def _fetch(self, batch: RolloutBatch, chosen: int, indices: Sequence[int]) -> int:
        """Return an anonymous file with trajectories that rank 0 has sent."""
        request = json.dumps([batch.number, chosen, list(indices)]).encode()
        file = anonymous_file()
        try:
            with socket.create_connection((self._host, self._port), self._timeout_s) as connection:
                connection.sendall(self._token + LENGTH.pack(len(request)) + request)
                length = bytearray(LENGTH.size)
                receive_into(connection, memoryview(length))
                (size,) = LENGTH.unpack(length)
                if not size:
                    raise ConnectionError("it does not have them")
                os.ftruncate(file, size)
                with mmap.mmap(file, size) as target, memoryview(target) as view:
                    received = receive_into(connection, view)
                if received < size:
                    raise ConnectionError(f"{received} of {size} bytes arrived")
        except OSError as error:
            os.close(file)
            raise StoreError(
                f"rank {rank()} could not fetch its trajectories from rank 0: {one_line(error)}",
                expected=f"an answer of {self._host}:{self._port} within {self._timeout_s:g} s",
                remedy="Machines must reach each other at that address; backend.heartbeat_timeout_s limits the wait",
            ) from error
        return file

    def _forget(self) -> None:
        if self._server is not None:
            self._server.offer = None
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def close(self) -> None:
        """Stop serving and free the trajectories; those that were returned stay usable."""
        self._forget()
        if self._server is not None:
            self._server.close()


def _read(file: int, section: tuple[int, int], indices: Sequence[int]) -> tuple[list[Trajectory], int]:
    """Return trajectories that view a section of a file, and the bytes of their records."""
    start, size = section
    mapped = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))[start : start + size]
    sizes = np.diff(read_table(mapped).astype(np.int64))
    return list(read_section(mapped, indices)), int(sizes[list(indices)].sum())


def _with_routes(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with the routes that a worker has encoded, where one has sampled it."""
    if trajectory.encoded is None:
        return trajectory
    return replace(read_record(trajectory.encoded.records[None]), advantage=trajectory.advantage)


def _merge_layers(by_set: Sequence[list[Trajectory]]) -> list[Trajectory]:
    """Return trajectories with all layers, from the same trajectories with some layers each."""
    if len(by_set) == 1:
        return by_set[0]
    return [
        replace(parts[0], trace=RouteTrace.merge([part.trace for part in parts])) for parts in zip(*by_set, strict=True)
    ]


def _common_layers(trajectories: Sequence[Trajectory]) -> Layers:
    """Return the layers that the routes of all trajectories were recorded for."""
    layer_sets = sorted({trajectory.layers for trajectory in trajectories})
    if len(layer_sets) > 1:
        raise AlignmentError(
            "the routes of a step were recorded for different decoder layers",
            expected=f"layers {list(layer_sets[0])}",
            found=f"layers {list(layer_sets[1])}",
            remedy="All engines of a run must have the same model, and capture the same layers",
        )
    return layer_sets[0] if layer_sets else ()


# ---- rank 0 serves records to ranks on other machines ---------------------------------------------------------------
#
# From its file to the socket, without a copy:
#
# request: token | u64 length | JSON [batch, section, numbers of records]
# answer:  u64 length | a section (`wire.py`) of these records; length 0: rank 0 has no such batch


class Offer(NamedTuple):
    """A batch that is served: its number, its own file descriptor, and its sections."""

    number: int
    file: int
    sections: tuple[tuple[int, int], ...]


class SectionServer:
    """Answers requests in its own threads.

    offer        what is served; None: every rank has its trajectories
    sent_bytes   of all answers
    """

    def __init__(self, listener: socket.socket, token: bytes, timeout_s: float) -> None:
        self.offer: Offer | None = None
        self.sent_bytes = 0
        self._listener, self._token, self._timeout_s = listener, token, timeout_s
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "trajectories")
        threading.Thread(target=self._accept, name="trajectories", daemon=True).start()

    def close(self) -> None:
        self.offer = None
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        with suppress(RuntimeError):  # closed
            for connection, _ in admitted(self._listener, self._token):
                self._pool.submit(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the rank that asked says what went wrong
            connection.settimeout(self._timeout_s)
            length = bytearray(LENGTH.size)
            if receive_into(connection, memoryview(length)) < len(length):
                return
            request = bytearray(min(*LENGTH.unpack(length), _REQUEST_BYTES))
            if receive_into(connection, memoryview(request)) < len(request):
                return
            number, section, indices = json.loads(request)
            offer = self.offer
            if offer is None or offer.number != number:
                connection.sendall(LENGTH.pack(0))
                return
            self._send(connection, os.dup(offer.file), offer.sections[section][0], indices)

    def _send(self, connection: socket.socket, file: int, start: int, indices: Sequence[int]) -> None:
        with os.fdopen(file, "rb") as opened:
            count = int.from_bytes(os.pread(file, 8, start), "little")
            offsets = read_table(memoryview(os.pread(file, table_bytes(count), start))).astype(np.int64)
            chosen = np.asarray(indices, np.int64)
            sizes = offsets[chosen + 1] - offsets[chosen]
            header = table((table_bytes(len(chosen)) + np.concatenate([[0], np.cumsum(sizes)])).tolist())
            total = len(header) + int(sizes.sum())
            connection.sendall(LENGTH.pack(total) + header)
            for begin, end in _runs(offsets[chosen].tolist(), offsets[chosen + 1].tolist()):
                connection.sendfile(opened, start + begin, end - begin)
        with self._lock:
            self.sent_bytes += total


def _runs(begins: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield stretches of bytes, with those that follow each other as one."""
    run: tuple[int, int] | None = None
    for begin, end in zip(begins, ends, strict=True):
        if run is not None and run[1] == begin:
            run = run[0], end
            continue
        if run is not None:
            yield run
        run = begin, end
    if run is not None:
        yield run
