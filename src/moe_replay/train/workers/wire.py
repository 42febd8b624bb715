"""Messages between rank 0 and a rollout worker: JSON over a Unix socket, with descriptors of shared memory.

Trajectories are records (`trajectories/wire.py`) in segments of shared memory. A worker fills one segment after the
other; rank 0 maps each, and its memory is freed with the last trajectory in it.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from moe_replay.distributed.network import receive_into
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.records import EncodedTrajectory, Layers, SamplingParams, Trajectory
from moe_replay.train.rollout.groups import Group, GroupTask
from moe_replay.train.rollout.prompts import Prompt
from moe_replay.train.rollout.reward_worker import LENGTH, from_content, to_frame
from moe_replay.train.trajectories.wire import Buffers, read_record, record_parts
from moe_replay.utils.files import anonymous_file, write_at


class WorkerError(MoeReplayError):
    """A worker process that has ended, or an error in it that no other class is for."""

    exit_status = ExitStatus.FAILED


class Message(NamedTuple):
    """A message, and the descriptor that came with it; -1: none."""

    content: dict[str, Any]
    file: int = -1


class Channel:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, content: Mapping[str, Any], file: int = -1) -> None:
        """Send a message, and with it a descriptor that the receiver gets a copy of; OSError if it has closed."""
        frame = memoryview(to_frame(content))
        with self._lock:
            if file >= 0:
                socket.send_fds(self.connection, [frame[:1]], [file])
                frame = frame[1:]
            self.connection.sendall(frame)

    def receive(self) -> Message | None:
        """Return the next message; None when the other end has closed; OSError if its descriptor has no place here."""
        files: list[int] = []
        with suppress(ConnectionError):  # it has ended with messages that it had not read
            first, files, flags, _ = socket.recv_fds(self.connection, 1, 1)
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            rest = bytearray(LENGTH.size - 1)
            if first and receive_into(self.connection, memoryview(rest)) == len(rest):
                content = bytearray(*LENGTH.unpack(first + rest))
                if receive_into(self.connection, memoryview(content)) == len(content):
                    return Message(from_content(bytes(content)), *files)
        for file in files:  # of a message that did not come whole
            os.close(file)
        return None


def error_from_content(content: Mapping[str, Any], worker: str) -> MoeReplayError:
    """Return the error of a worker in its own class, where this process knows it."""
    usual = [kind for kind in _kinds(MoeReplayError) if kind.__init__ is MoeReplayError.__init__]
    kinds = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in usual}
    error = kinds.get(content["kind"], WorkerError)(**content["parts"])
    if content["traceback"]:
        error.add_note(f"In {worker}:\n{content['traceback']}")
    return error


def _kinds(kind: type[MoeReplayError]) -> Iterator[type[MoeReplayError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


# ---- groups ----------------------------------------------------------------------------------------------------------


SEGMENT_BYTES = 2**28
LayerSets = Sequence[Layers | None]
Texts = Callable[[Trajectory], tuple[str, str]]


def task_to_content(task: GroupTask) -> dict[str, Any]:
    return {
        "prompt": {name: getattr(task.prompt, name) for name in ("row", "content", "token_ids", "columns")},
        "index": task.index,
        "params": dataclasses.asdict(task.params),
        "is_kept": task.is_kept,
    }


def task_from_content(content: Mapping[str, Any]) -> GroupTask:
    prompt, params = content["prompt"], content["params"]
    tuples = {name: tuple(params[name]) for name in ("stop_token_ids", "seeds")}
    return GroupTask(
        prompt=Prompt(prompt["row"], prompt["content"], tuple(prompt["token_ids"]), prompt["columns"]),
        index=content["index"],
        params=SamplingParams(**params | tuples),
        is_kept=content["is_kept"],
    )


# ---- in the worker --------------------------------------------------------------------------------------------------


class GroupWriter:
    """Writes groups into segments, and says where they are; one thread at a time.

    announce   called with the descriptor of each new segment, before groups in it are
    texts      of prompt and completion, where they are logged
    """

    def __init__(self, layer_sets: LayerSets, announce: Callable[[int], None], texts: Texts | None = None) -> None:
        self._layer_sets, self._announce, self._texts = layer_sets, announce, texts
        self._file, self._size, self._used = -1, 0, 0

    def write(self, group: Group) -> dict[str, Any]:
        """Write the trajectories of a group and return it as the content of a message."""
        trajectories = group.trajectories
        records = [[record_parts(trajectory, layers) for layers in self._layer_sets] for trajectory in trajectories]
        sizes = [[sum(map(len, parts)) for parts in sets] for sets in records]
        self._make_room(sum(map(sum, sizes)))
        described = [
            {
                "records": [self._append(parts) for parts in sets],
                "layers": trajectory.trace.layers,
                "texts": None if self._texts is None else self._texts(trajectory),
            }
            for trajectory, sets in zip(trajectories, records, strict=True)
        ]
        return {"trajectories": described, "scores": {name: values.tolist() for name, values in group.scores.items()}}

    def _make_room(self, size: int) -> None:
        """Begin another segment if a group does not fit into this one."""
        if self._used + size <= self._size:
            return
        self.close()
        self._file, self._size, self._used = anonymous_file(), max(size, SEGMENT_BYTES), 0
        os.ftruncate(self._file, self._size)  # pages are taken when they are written
        self._announce(self._file)

    def _append(self, parts: Buffers) -> tuple[int, int]:
        start = self._used
        self._used += write_at(self._file, start, parts)
        return start, self._used - start

    def close(self) -> None:
        """Leave the segment to rank 0."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


# ---- on rank 0 ------------------------------------------------------------------------------------------------------


def map_segment(file: int) -> memoryview:
    """Return the memory of a segment, read-only; the descriptor is closed."""
    try:
        return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(file)


def group_from_content(content: Mapping[str, Any], segment: memoryview, layer_sets: LayerSets) -> Group:
    """Return the group of a message, whose bodies are in a segment."""
    trajectories = [_trajectory(described, segment, layer_sets) for described in content["trajectories"]]
    return Group(trajectories, {name: np.array(values, np.float64) for name, values in content["scores"].items()})


def _trajectory(content: Mapping[str, Any], segment: memoryview, layer_sets: LayerSets) -> Trajectory:
    """Return a trajectory whose arrays view the segment; its routes stay encoded."""
    records = {
        layers: segment[start : start + size]
        for layers, (start, size) in zip(layer_sets, content["records"], strict=True)
    }
    texts = None if content["texts"] is None else (content["texts"][0], content["texts"][1])
    encoded = EncodedTrajectory(records, tuple(content["layers"]), texts)
    return dataclasses.replace(read_record(records[layer_sets[0]], routes=False), encoded=encoded)
