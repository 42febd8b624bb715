"""The rollout of one step on all ranks: rank 0 samples, all ranks get the headers, and the store keeps the rest.

An evaluation is sampled in the same way, whatever servers do meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_replay.distributed.collectives import broadcast_bytes
from moe_replay.distributed.ranks import any_rank, raise_on_all_ranks, world_size
from moe_replay.errors import EngineUnavailableError
from moe_replay.train.backends.base import Backend
from moe_replay.train.batches import layers_of
from moe_replay.train.data import Prompt
from moe_replay.train.rollouts import Rollouts
from moe_replay.train.shared_devices import SharedDevices
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.trajectories.ray_store import RayStore, ranks_share_ray
from moe_replay.train.trajectories.shared_batch import SharedBatch
from moe_replay.train.trajectories.store import InProcessStore, RankStore, TrajectoryStore
from moe_replay.utils.progress import ProgressCallback

T = TypeVar("T")
MAX_FAILURES = 3
"""Times that the sampling of a step, or an evaluation, is begun again because no server was left."""
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
    work = None
    if rollouts is not None:
        work = _Work(
            rollouts.engine,
            has_begun=lambda: rollouts.has_begun,
            result_unless=lambda give_up: rollouts.next_unless(give_up, version, progress),
        )
    batch = _sampled(work, refit, "sampling")
    made: SharedBatch | None = None
    with raise_on_all_ranks("keeping the samples"):
        if batch is not None:
            made = SharedBatch.put(batch, store)
            devices.put_engine_to_sleep()
    if world_size() > 1:
        sent = broadcast_bytes(None if made is None else made.to_bytes())
        made = SharedBatch.from_bytes(sent, store) if made is None else made
    assert made is not None
    return made


def evaluate(
    rollouts: Rollouts | None, prompts: Sequence[Prompt], temperature: float, *, refit: Callable[[], None]
) -> dict[str, float]:
    """Return on rank 0 the metrics of an evaluation, which samples there. All ranks call it; see `roll_out`."""
    if rollouts is None:
        return _sampled(None, refit, "evaluation") or {}
    evaluation = rollouts.evaluation(prompts, temperature)
    work = _Work(rollouts.engine, lambda: evaluation.has_begun, evaluation.metrics_unless)
    try:
        return _sampled(work, refit, "evaluation") or {}
    finally:
        evaluation.withdraw()  # if one of its sequences failed, the others need not finish


@dataclass(frozen=True, slots=True)
class _Work(Generic[T]):
    """Something that rank 0 samples.

    has_begun       whether some of it is in flight
    result_unless   returns it, or None as soon as the function that it is given says so; the next call goes on, or
                    begins again if no server was left
    """

    engine: SyncedEngine
    has_begun: Callable[[], bool]
    result_unless: Callable[[Callable[[], bool] | None], T | None]


def _sampled(work: _Work[T] | None, refit: Callable[[], None], doing: str) -> T | None:
    """Return what rank 0 samples, there; servers that restart are refitted, and what had no server begins again."""
    failures = refits = 0
    while True:
        had_begun = work is not None and work.has_begun()
        refit()
        made: T | None = None
        with raise_on_all_ranks(doing):
            if work is not None:
                engine = work.engine
                try:
                    give_up = engine.lacks_weights if refits < max(MAX_REFITS, engine.servers()) else None
                    made = work.result_unless(give_up)
                    refits += made is None
                except EngineUnavailableError:
                    failures += 1
                    # What had begun may have failed because no server was left, or none with the weights just sent.
                    if failures > MAX_FAILURES:
                        raise
                    if not (engine.wait_for_servers() or had_begun or engine.lacks_weights()):
                        raise
        if any_rank(made is not None):
            return made
