"""Trainer and engine in turns on the same devices: one of them sleeps, or is in host memory, while the other works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from moe_replay.distributed.ranks import raise_on_all_ranks
from moe_replay.train.backends.base import Backend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.synced_engine import SyncedEngine


class SharedDevices:
    """Who has the memory: `rollout.sleep` frees the engine's, `backend.offload` the trainer's.

    engine   of the run, on rank 0; None on other ranks, and until it is started
    """

    def __init__(self, config: TrainConfig, backend: Backend) -> None:
        self.engine: SyncedEngine | None = None
        self._backend = backend
        self._offload, self._sleep = config.backend.offload, config.rollout.sleep
        self._level = config.rollout.sleep_level

    def start_with(self, engine: SyncedEngine) -> None:
        """Take the engine of the run, which has its memory, and have it free that for the trainer."""
        self.engine = engine
        if self._offload:
            self.put_engine_to_sleep()

    def put_engine_to_sleep(self, level: int | None = None) -> None:
        """Free the engine's memory; on rank 0."""
        if self._sleep and self.engine is not None:
            self.engine.sleep(level or self._level)

    def wake_engine_for_update(self) -> None:
        """Have the engine take memory for its weights; on rank 0. The rest follows when it has read all of them."""
        if self._sleep and self.engine is not None:
            self.engine.wake_for_update()

    def weights_then_offload(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights; after the last one the trainer's memory is freed. On all ranks."""
        for name, tensor in self._backend.weights():
            # A copy: it may share memory that is freed before the engine has read it.
            yield name, tensor.clone() if self._offload else tensor
        self._free_trainer_memory()

    @contextmanager
    def trainer_awake(self) -> Iterator[None]:
        """Have the policy on its devices inside this context, after a sync of the weights. On all ranks."""
        if not self._offload:
            yield
            return
        with raise_on_all_ranks("putting the engine to sleep"):
            self.put_engine_to_sleep(level=1)  # no update follows
        self._backend.reload()
        yield
        self._free_trainer_memory()
        with raise_on_all_ranks("waking the engine"):
            if self._sleep and self.engine is not None:
                self.engine.wake()

    def _free_trainer_memory(self) -> None:
        if self._offload:
            self._backend.offload()
            dist.barrier()  # the engine may take memory of any rank's device
