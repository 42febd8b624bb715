"""Where the trajectories of a step stay until the rank that trains on them asks for them.

    ref = store.put(trajectories)                    # where they arrive: on rank 0
    store.get(ref, numbers=[3, 5], layers=(4, 5))    # on any rank: its own sequences, the layers of its pipeline stage

`InProcessStore` is for one rank. `RankStore` is for ranks of a launcher: rank 0 encodes the trajectories once for each
pipeline stage in an anonymous file in memory. Ranks on its machine map it; on other machines one of the ranks that
need the same trajectories fetches them over a socket, and the others map its copy. `RayStore` (`ray_store.py`) is for
ranks in a Ray job.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist

from moe_replay.distributed.control import control_group
from moe_replay.distributed.machines import machine_id
from moe_replay.distributed.rank_server import open_rank_server, receive_into
from moe_replay.distributed.ranks import all_gather_text, rank
from moe_replay.errors import AlignmentError, ExitStatus, MoeReplayError
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.trajectories.encoded import Layers, decoded, parts_of, recorded_layers
from moe_replay.train.trajectories.section_server import LENGTH, SectionServer
from moe_replay.train.trajectories.wire import read_section, read_table, table, table_bytes
from moe_replay.train.types import AnyTrajectory, Trajectory
from moe_replay.utils.memory_files import anonymous_file, write_at
from moe_replay.utils.messages import one_line


class StoreError(MoeReplayError):
    """Trajectories that could not be read from the rank that holds them."""

    exit_status = ExitStatus.FAILED


class BatchRef(NamedTuple):
    """The trajectories of one step in a store.

    number     of the batch
    count      trajectories in it
    layers     all layers that their routes were recorded for
    file       descriptor of the anonymous file in the process of rank 0
    sections   (start, size) in it for each set of layers
    """

    number: int
    count: int
    layers: Layers
    file: int = -1
    sections: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> str:
        """Return the reference as text."""
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the reference of a text."""
        number, count, layers, file, sections = json.loads(text)
        return cls(number, count, tuple(layers), file, tuple((start, size) for start, size in sections))


class TrajectoryStore(Protocol):
    """Store interface of the training loop."""

    received_bytes: int

    @property
    def layer_sets(self) -> Sequence[Layers | None]:
        """Sets of layers that trajectories are encoded for, one for each pipeline stage; None: all of them."""
        ...

    def put(self, trajectories: Sequence[AnyTrajectory]) -> BatchRef:
        """Keep the trajectories of a step, and no longer those of the step before."""
        ...

    def get(self, ref: BatchRef, numbers: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories, in this order, with the routes of at least these layers."""
        ...

    def whole(self, ref: BatchRef, numbers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of all layers; where they were put."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class InProcessStore:
    """The trajectories themselves, for one rank."""

    layer_sets: Sequence[Layers | None] = (None,)

    def __init__(self) -> None:
        self.received_bytes = 0
        self._trajectories: Sequence[AnyTrajectory] = ()
        self._number = 0

    def put(self, trajectories: Sequence[AnyTrajectory]) -> BatchRef:
        """Keep the trajectories of a step."""
        self._trajectories = trajectories
        self._number += 1
        return BatchRef(self._number, len(trajectories), recorded_layers(trajectories[0]) if trajectories else ())

    def get(self, ref: BatchRef, numbers: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with all their layers."""
        return self.whole(ref, numbers)

    def whole(self, ref: BatchRef, numbers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories."""
        assert ref.number == self._number, "the trajectories of an earlier step are not kept"
        return [decoded(self._trajectories[number]) for number in numbers]

    def close(self) -> None:
        """Free the trajectories."""
        self._trajectories = ()


class _RankLocation(NamedTuple):
    """Location of a rank, and the share it asks for; ranks of one machine that ask for the same one share a copy."""

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
        gathered = map(json.loads, all_gather_text(json.dumps(self._own)))
        self._locations = [_RankLocation(pid, where, share, tuple(some)) for pid, where, share, some in gathered]
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
        """Sets of layers that trajectories are encoded for, one for each pipeline stage."""
        return self._sets

    def put(self, trajectories: Sequence[AnyTrajectory]) -> BatchRef:
        """Encode the trajectories of a step, once for each pipeline stage; on rank 0."""
        layers = common_layers(trajectories)
        self._forget()
        self._file = anonymous_file()
        end, sections = 0, []
        for wanted in self._sets:
            start, end = end, end + table_bytes(len(trajectories))
            offsets = [end - start]
            for one in trajectories:
                end += write_at(self._file, end, parts_of(one, wanted))
                offsets.append(end - start)
            write_at(self._file, start, [memoryview(table(offsets))])
            sections.append((start, end - start))
        self._number += 1
        if self._server is not None:
            self._server.offer(self._number, self._file, sections)
        return BatchRef(self._number, len(trajectories), layers, self._file, tuple(sections))

    def whole(self, ref: BatchRef, numbers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of all layers; on rank 0."""
        return merge_layers([_read(self._file, section, numbers)[0] for section in ref.sections])

    # ---- on any rank --------------------------------------------------------------------------------------------

    def get(self, ref: BatchRef, numbers: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of this rank's layers. All ranks call it."""
        assert tuple(layers) == self._own.layers, "a rank has the layers that it opened the store with"
        chosen, first = self._sets.index(self._own.layers), self._locations[0]
        if rank() == 0:
            return self._counted(self._file, ref.sections[chosen], numbers)
        if self._own.machine and self._own.machine == first.machine:
            mapped = self._map(first.pid, ref.file, ref.sections[chosen], numbers)
            return self._fetch_alone(ref, chosen, numbers) if mapped is None else mapped
        return self._fetch_together(ref, chosen, numbers)

    def _fetch_together(self, ref: BatchRef, chosen: int, numbers: Sequence[int]) -> list[Trajectory]:
        """Fetch trajectories once for all ranks of this machine that ask for the same."""
        sharing = [number for number, location in enumerate(self._locations) if location[1:] == self._own[1:]]
        if not self._own.machine:
            sharing = [rank()]
        told = torch.zeros(2, dtype=torch.int64)
        if rank() != sharing[0]:
            dist.recv(told, sharing[0], group=control_group())
            file, size = told.tolist()
            mapped = self._map(self._locations[sharing[0]].pid, file, (0, size), range(len(numbers)))
            return self._fetch_alone(ref, chosen, numbers) if mapped is None else mapped
        found = self._fetch_alone(ref, chosen, numbers)
        told[0], told[1] = self._file, os.fstat(self._file).st_size
        for other in sharing[1:]:
            dist.send(told, other, group=control_group())
        return found

    def _fetch_alone(self, ref: BatchRef, chosen: int, numbers: Sequence[int]) -> list[Trajectory]:
        self._forget()
        self._file = self._fetch(ref, chosen, numbers)
        return self._counted(self._file, (0, os.fstat(self._file).st_size), range(len(numbers)))

    def _map(self, pid: int, file: int, section: tuple[int, int], numbers: Sequence[int]) -> list[Trajectory] | None:
        """Return trajectories from a file of another process; None if that is not allowed here."""
        try:
            opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY)
        except OSError:
            return None
        try:
            return self._counted(opened, section, numbers)
        finally:
            os.close(opened)

    def _counted(self, file: int, section: tuple[int, int], numbers: Sequence[int]) -> list[Trajectory]:
        found, size = _read(file, section, numbers)
        self.received_bytes += size
        return found

    def _fetch(self, ref: BatchRef, chosen: int, numbers: Sequence[int]) -> int:
        """Return an anonymous file with trajectories that rank 0 has sent."""
        asked = json.dumps([ref.number, chosen, list(numbers)]).encode()
        file = anonymous_file()
        try:
            with socket.create_connection((self._host, self._port), self._timeout_s) as connection:
                connection.sendall(self._token + LENGTH.pack(len(asked)) + asked)
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
                remedy="Machines must reach each other at that address; backend.rank_timeout_s is how long one waits",
            ) from error
        return file

    def _forget(self) -> None:
        if self._server is not None:
            self._server.withdraw()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def close(self) -> None:
        """Stop serving and free the trajectories; those that were returned stay usable."""
        self._forget()
        if self._server is not None:
            self._server.close()


def _read(file: int, section: tuple[int, int], numbers: Sequence[int]) -> tuple[list[Trajectory], int]:
    """Return trajectories that view a section of a file, and the bytes of their records."""
    start, size = section
    mapped = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))[start : start + size]
    sizes = np.diff(read_table(mapped).astype(np.int64))
    return list(read_section(mapped, numbers)), int(sizes[list(numbers)].sum())


def merge_layers(by_set: Sequence[list[Trajectory]]) -> list[Trajectory]:
    """Return trajectories with all layers, from the same trajectories with some layers each."""
    if len(by_set) == 1:
        return by_set[0]
    return [
        replace(parts[0], trace=RouteTrace.merge([part.trace for part in parts])) for parts in zip(*by_set, strict=True)
    ]


def common_layers(trajectories: Sequence[AnyTrajectory]) -> Layers:
    """Return the layers that the routes of all trajectories were recorded for."""
    found = sorted({recorded_layers(one) for one in trajectories})
    if len(found) > 1:
        raise AlignmentError(
            "the routes of a step were recorded for different decoder layers",
            expected=f"layers {list(found[0])}",
            found=f"layers {list(found[1])}",
            remedy="All engines of a run must have the same model, and capture the same layers",
        )
    return found[0] if found else ()
