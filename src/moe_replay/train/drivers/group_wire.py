"""Groups on their way: a task to a driver process, and the group that it has sampled back to rank 0.

Bodies of trajectories are records (`trajectories/wire.py`) in segments of shared memory. A driver fills one segment
after the other; rank 0 maps each, and its memory is free when the last trajectory in it is.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moe_replay.rollout.types import SamplingParams
from moe_replay.train.data import Prompt
from moe_replay.train.groups import GroupTask
from moe_replay.train.trajectories.encoded import EncodedTrajectory, Layers
from moe_replay.train.trajectories.wire import Buffers, record_parts
from moe_replay.train.types import Group, Trajectory
from moe_replay.utils.memory_files import anonymous_file, write_at

SEGMENT_BYTES = 2**28
LayerSets = Sequence[Layers | None]
Texts = Callable[[Trajectory], tuple[str, str]]


def task_to_content(task: GroupTask) -> dict[str, Any]:
    """Return a task as the content of a message."""
    return {
        "prompt": {name: getattr(task.prompt, name) for name in ("row", "content", "token_ids", "columns")},
        "number": task.number,
        "params": dataclasses.asdict(task.params),
        "first": None if task.first is None else dataclasses.asdict(task.first),
        "is_kept": task.is_kept,
    }


def task_from_content(content: Mapping[str, Any]) -> GroupTask:
    """Return the task of a message."""
    prompt, first = content["prompt"], content["first"]
    return GroupTask(
        prompt=Prompt(prompt["row"], prompt["content"], tuple(prompt["token_ids"]), prompt["columns"]),
        number=content["number"],
        params=_params(content["params"]),
        first=None if first is None else _params(first),
        is_kept=content["is_kept"],
    )


def _params(given: Mapping[str, Any]) -> SamplingParams:
    changed: dict[str, Any] = {**given, "stop_token_ids": tuple(given["stop_token_ids"])}
    return SamplingParams(**changed)


# ---- in the driver --------------------------------------------------------------------------------------------------


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
        trajectories = [one for one in group.trajectories if isinstance(one, Trajectory)]
        records = [[record_parts(one, layers) for layers in self._layer_sets] for one in trajectories]
        sizes = [[sum(map(len, parts)) for parts in sets] for sets in records]
        self._make_room(sum(map(sum, sizes)))
        described = [
            {
                "records": [self._append(parts) for parts in sets],
                "layers": one.trace.layers,
                "texts": None if self._texts is None else self._texts(one),
            }
            for one, sets in zip(trajectories, records, strict=True)
        ]
        return {
            "trajectories": described,
            "scores": {name: values.tolist() for name, values in group.scores.items()},
        }

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
    trajectories = [
        EncodedTrajectory(
            records={
                layers: segment[start : start + size]
                for layers, (start, size) in zip(layer_sets, one["records"], strict=True)
            },
            layers=tuple(one["layers"]),
            texts=None if one["texts"] is None else (one["texts"][0], one["texts"][1]),
        )
        for one in content["trajectories"]
    ]
    return Group(trajectories, {name: np.array(values, np.float64) for name, values in content["scores"].items()})
