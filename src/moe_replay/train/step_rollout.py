"""The rollout of one step on all ranks: rank 0 samples, all ranks get the heads, and the store keeps the rest."""

from __future__ import annotations

from collections.abc import Callable

from moe_replay.distributed.collectives import broadcast_bytes
from moe_replay.distributed.ranks import raise_on_all_ranks, world_size
from moe_replay.errors import EngineUnavailableError
from moe_replay.train.backends.base import Backend
from moe_replay.train.batches import layers_of
from moe_replay.train.rollouts import Rollouts
from moe_replay.train.shared_devices import SharedDevices
from moe_replay.train.trajectories.ray_store import RayStore, ranks_share_ray
from moe_replay.train.trajectories.shared_batch import SharedBatch
from moe_replay.train.trajectories.store import InProcessStore, RankStore, TrajectoryStore
from moe_replay.utils.progress import ProgressCallback

MAX_FAILURES = 3
"""Times that the sampling of a step is begun again because no server was left."""
MAX_REFITS = 3
"""Times that it waits for servers that restarted to be sent the weights, or as many as there are servers."""


def open_store(backend: Backend, timeout_s: float) -> TrajectoryStore:
    """Return the store of a job, which its ranks reach. All ranks call it."""
    if world_size() == 1:
        return InProcessStore()
    if ranks_share_ray():
        return RayStore(layers_of(backend), timeout_s)
    return RankStore(backend.data_rank, layers_of(backend), timeout_s)


def roll_out(
    rollouts: Rollouts | None,
    store: TrajectoryStore,
    devices: SharedDevices,
    version: int,
    *,
    refit: Callable[[], None],
    progress: ProgressCallback | None = None,
) -> SharedBatch:
    """Return the rollout batch of the next step, which rank 0 samples. All ranks call it.

    rollouts   on rank 0, None on the others
    version    of the weights that are trained on it
    refit      sends the weights again if a server has lost them, before sampling or while others sample
    """
    failures = refits = 0
    while True:
        had_begun = rollouts is not None and rollouts.has_begun
        refit()
        made: SharedBatch | None = None
        with raise_on_all_ranks("sampling"):
            if rollouts is not None:
                engine = rollouts.engine
                try:
                    give_up = engine.lacks_weights if refits < max(MAX_REFITS, engine.servers()) else None
                    batch = rollouts.next_unless(give_up, version, progress)
                    made = None if batch is None else SharedBatch.put(batch, store)
                    refits += batch is None
                except EngineUnavailableError:
                    failures += 1
                    # What had begun may have failed because no server was left, or none with the weights just sent.
                    if failures > MAX_FAILURES:
                        raise
                    if not (engine.wait_for_servers() or had_begun or engine.lacks_weights()):
                        raise
                if made is not None:
                    devices.put_engine_to_sleep()
        if world_size() == 1:
            if made is not None:
                return made
            continue
        content = b"" if made is None else made.to_bytes()
        sent = broadcast_bytes(content if rollouts is not None else None)
        if sent:
            return SharedBatch.from_bytes(sent, store) if made is None else made
