"""The rollout of one step on all ranks: rank 0 samples, all ranks get the headers, and the store keeps the rest.

An evaluation is sampled in the same way. Both survive servers that restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_replay.distributed.collectives import broadcast_bytes
from moe_replay.distributed.ranks import any_rank, raise_on_all_ranks, world_size
from moe_replay.errors import EngineUnavailableError
from moe_replay.records import RolloutBatch
from moe_replay.train.backends.base import Backend
from moe_replay.train.learn.batches import layers_of
from moe_replay.train.rollout.groups import ShouldStop
from moe_replay.train.rollout.prompts import Prompt
from moe_replay.train.rollout.rollouts import Rollouts
from moe_replay.train.sync.shared_devices import SharedDevices
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.trajectories.store import InProcessStore, RankStore, TrajectoryStore
from moe_replay.train.trajectories.wire import batch_from_bytes, batch_to_bytes
from moe_replay.utils.misc import ProgressCallback

T = TypeVar("T")
MAX_FAILURES = 3
"""Times that the sampling of a step, or an evaluation, starts over because no server was left."""
MAX_RESENDS = 3
"""Times that it waits for the weights to reach restarted servers again, or once per server if there are more."""


def open_store(backend: Backend, timeout_s: float) -> TrajectoryStore:
    """Return the store that the ranks of this run reach. Collective."""
    if world_size() == 1:
        return InProcessStore()
    return RankStore(backend.data_rank, layers_of(backend), timeout_s)


def roll_out(
    rollouts: Rollouts | None,
    devices: SharedDevices,
    version: int,
    *,
    resend_weights: Callable[[], None],
    progress: ProgressCallback | None = None,
) -> RolloutBatch:
    """Return the rollout batch of the next step, which rank 0 samples. Collective.

    rollouts   on rank 0, None on the others
    version    of the weights that are trained on it
    resend_weights   sends the weights again if a server has lost them, before sampling or while others sample
    """
    work = None
    if rollouts is not None:
        work = _Work(
            rollouts.engine,
            has_begun=lambda: rollouts.has_begun,
            result=lambda should_stop: rollouts.next_batch(version, should_stop, progress),
        )
    batch = _sampled(work, resend_weights, "sampling")
    with raise_on_all_ranks("putting the engine to sleep"):
        if batch is not None:
            devices.put_engine_to_sleep()
    if world_size() > 1:
        sent = broadcast_bytes(None if batch is None else batch_to_bytes(batch))
        batch = batch_from_bytes(sent) if batch is None else batch
    assert batch is not None
    return batch


def evaluate(
    rollouts: Rollouts | None, prompts: Sequence[Prompt], temperature: float, *, resend_weights: Callable[[], None]
) -> dict[str, float]:
    """Return on rank 0 the metrics of an evaluation, which samples there. Collective; see `roll_out`."""
    if rollouts is None:
        return _sampled(None, resend_weights, "evaluation") or {}
    evaluation = rollouts.evaluation(prompts, temperature)
    work = _Work(rollouts.engine, lambda: evaluation.has_begun, evaluation.metrics)
    try:
        return _sampled(work, resend_weights, "evaluation") or {}
    finally:
        evaluation.withdraw()  # if one of its sequences failed, the others need not finish


@dataclass(frozen=True, slots=True)
class _Work(Generic[T]):
    """Something that rank 0 samples.

    has_begun   whether some of it is in flight
    result      returns it, or None once `should_stop` returns True; the next call continues, or starts over if no
                server was left
    """

    engine: SyncedEngine
    has_begun: Callable[[], bool]
    result: Callable[[ShouldStop | None], T | None]


def _sampled(work: _Work[T] | None, resend_weights: Callable[[], None], doing: str) -> T | None:
    """Return on rank 0 its work. Restarted servers get the weights again; work that had no server starts over."""
    failures = resends = 0
    while True:
        had_begun = work is not None and work.has_begun()
        resend_weights()
        result: T | None = None
        with raise_on_all_ranks(doing):
            if work is not None:
                engine = work.engine
                try:
                    should_stop = engine.lacks_weights if resends < max(MAX_RESENDS, engine.server_count()) else None
                    result = work.result(should_stop)
                    resends += result is None
                except EngineUnavailableError:
                    failures += 1
                    # What had begun may have failed because no server was left, or none with the weights just sent.
                    if failures > MAX_FAILURES:
                        raise
                    if not (engine.wait_for_servers() or had_begun or engine.lacks_weights()):
                        raise
        if any_rank(result is not None):
            return result
