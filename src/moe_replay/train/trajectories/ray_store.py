"""`RayStore`: trajectories in Ray's object store, for ranks that are actors of one Ray job.

Rank 0 puts sections of `wire.py`, for each pipeline stage. A section is one object: a long sequence, or short ones that
have up to `OBJECT_BYTES` together, since an object costs Ray some milliseconds at any size. A rank gets those
with its own sequences and layers; Ray moves an object to a node once, and all ranks of that node view the same shared
memory. References travel through an actor (`utils/object_refs.py`), so that Ray counts them: objects are freed once
rank 0 puts the next batch and no rank views them.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from moe_replay.distributed.ranks import all_gather_text, from_rank_0, raise_on_all_ranks, rank
from moe_replay.records import Layers, RolloutBatch, Trajectory
from moe_replay.train.trajectories.store import StoreError, common_layers, merge_layers
from moe_replay.train.trajectories.wire import Buffers, header_of, read_record, read_table, section_of, stored_parts
from moe_replay.utils.misc import one_line
from moe_replay.utils.object_refs import ObjectRefs, Part, part_with

OBJECT_BYTES = 256 * 2**10
"""Sequences up to this size share objects. A node gets whole objects, so longer ones have one each."""


def ranks_share_ray() -> bool:
    """Return whether all ranks are workers of one Ray job, whose object store they share. All ranks call it."""
    jobs = set(all_gather_text(_ray_job()))
    return len(jobs) == 1 and "" not in jobs


def _ray_job() -> str:
    """Return the cluster and the job that this process is a worker of; empty outside of Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}" if context.worker.mode == ray.WORKER_MODE else ""


class RayStore:
    """The store of ranks in a Ray job. All ranks open it; rank 0 puts.

    object_bytes     size up to which sequences share an object
    received_bytes   of the records that `get` has returned on this rank
    """

    def __init__(self, layers: Layers, timeout_s: float, object_bytes: int = OBJECT_BYTES) -> None:
        import ray

        self._layers, self._timeout_s, self._object_bytes = layers, timeout_s, object_bytes
        self._sets = sorted({tuple(json.loads(some)) for some in all_gather_text(json.dumps(layers))})
        self._number = 0
        self._sections: list[list[Part]] = []
        self.received_bytes = 0
        self._keeper: Any = None
        name = from_rank_0(self._start_keeper, "starting the actor that keeps references to trajectories")
        with raise_on_all_ranks("finding the actor that keeps references to trajectories"):
            if self._keeper is None:
                self._keeper = ray.get_actor(name)

    def _start_keeper(self) -> str:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"moe-replay-trajectories-{secrets.token_hex(8)}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        keeper: Any = ray.remote(ObjectRefs).options(name=name, num_cpus=0, scheduling_strategy=here).remote()
        self._wait(keeper.keep.remote(0, ()), "start the actor that keeps references to trajectories")
        self._keeper = keeper
        return name

    # ---- on rank 0 ----------------------------------------------------------------------------------------------

    @property
    def layer_sets(self) -> Sequence[Layers | None]:
        return self._sets

    def put(self, trajectories: Sequence[Trajectory]) -> RolloutBatch:
        """Put the trajectories of a step, for each pipeline stage; on rank 0."""
        layers = common_layers(trajectories)
        self._forget()
        self._number += 1
        self._sections = [self._parts(trajectories, stage) for stage in self._sets]
        self._wait(self._keeper.keep.remote(self._number, self._sections), "tell where its trajectories are")
        return RolloutBatch(headers=list(map(header_of, trajectories)), layers=layers, number=self._number)

    def _parts(self, trajectories: Sequence[Trajectory], layers: Layers) -> list[Part]:
        """Put the trajectories with the routes of some layers."""
        parts: list[Part] = []
        start, records, size = 0, list[Buffers](), 0
        for index, trajectory in enumerate(trajectories):
            record = stored_parts(trajectory, layers)
            record_bytes = sum(map(len, record))
            if records and size + record_bytes > self._object_bytes:
                parts.append(Part(start, self._put(records)))
                start, records, size = index, [], 0
            records.append(record)
            size += record_bytes
        return [*parts, Part(start, self._put(records))] if records else parts

    def _put(self, records: Sequence[Buffers]) -> Any:
        import ray

        section = np.frombuffer(section_of(records), np.uint8)
        try:
            return ray.put(section)
        except ray.exceptions.RayError as error:
            raise StoreError(
                f"trajectories of {section.nbytes / 1e6:.1f} MB could not be put into Ray's object store: "
                f"{one_line(error)}",
                remedy="Give the node of rank 0 a larger object store (ray start --object-store-memory)",
            ) from error

    def whole(self, batch: RolloutBatch, indices: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of all layers; on rank 0."""
        assert batch.number == self._number, "the trajectories of an earlier step are not kept"
        return merge_layers([self._read(section, indices)[0] for section in self._sections])

    # ---- on any rank --------------------------------------------------------------------------------------------

    def get(self, batch: RolloutBatch, indices: Sequence[int], layers: Sequence[int]) -> list[Trajectory]:
        """Return some trajectories with the routes of this rank's layers."""
        assert tuple(layers) == self._layers, "a rank has the layers that it opened the store with"
        section = self._sets.index(self._layers)
        parts = self._wait(self._keeper.take.remote(batch.number, section, list(indices)), "find its trajectories")
        if parts is None:
            self._fail("find its trajectories", f"those of batch {batch.number} are not kept any more")
        trajectories, size = self._read(parts, indices)
        self.received_bytes += size
        return trajectories

    def _read(self, parts: Sequence[Part], indices: Sequence[int]) -> tuple[list[Trajectory], int]:
        """Return some of the trajectories of parts, which view Ray's shared memory, and the bytes of their records."""
        within = [part_with(index, parts) for index in indices]
        needed = sorted(set(within))
        objects = self._wait([parts[part_index].ref for part_index in needed], "fetch its trajectories")
        sections = {
            part_index: (section.data, read_table(section.data).tolist())
            for part_index, section in zip(needed, objects, strict=True)
        }
        trajectories, size = [], 0
        for index, part in zip(indices, within, strict=True):
            section, offsets = sections[part]
            start, end = offsets[index - parts[part].start :][:2]
            trajectories.append(read_record(section[start:end]))
            size += end - start
        return trajectories, size

    def _wait(self, what: Any, doing: str) -> Any:
        import ray

        try:
            return ray.get(what, timeout=self._timeout_s)
        except ray.exceptions.RayError as error:
            self._fail(doing, _reason(error, self._timeout_s), error)

    def _fail(self, doing: str, reason: str, error: BaseException | None = None) -> NoReturn:
        raise StoreError(
            f"rank {rank()} could not {doing} in Ray's object store: {reason}",
            remedy="Resume the run from its last checkpoint: trajectories of a step are sampled again. "
            "backend.heartbeat_timeout_s limits the wait",
        ) from error

    def _forget(self) -> None:
        self._sections = []
        if rank() == 0:
            self._keeper.keep.remote(0, ())

    def close(self) -> None:
        """Free the trajectories and end the actor; those that were returned stay usable."""
        import ray

        self._sections = []
        if rank() == 0 and ray.is_initialized():
            ray.kill(self._keeper)


def _reason(error: BaseException, timeout_s: float) -> str:
    """Say what has become of objects that Ray does not return."""
    from ray import exceptions

    reasons: tuple[tuple[type, Callable[[], str]], ...] = (
        (exceptions.GetTimeoutError, lambda: f"there was no answer within {timeout_s:g} s"),
        (exceptions.OwnerDiedError, lambda: "rank 0, which owns them, has ended"),
        (exceptions.ObjectLostError, lambda: "all copies are lost with the nodes that had them"),
        (
            exceptions.RayActorError,
            lambda: "the actor that keeps the references to them has ended, as rank 0 or its node",
        ),
    )
    return next((say() for kind, say in reasons if isinstance(error, kind)), one_line(error))
