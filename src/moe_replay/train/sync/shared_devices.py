"""Trainer and engine take turns on the same devices: one sleeps, or is in host memory, while the other works."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from moe_replay.distributed.ranks import barrier, raise_on_all_ranks
from moe_replay.train.backends.base import Backend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.sync.weight_sync import EngineSync, SyncReport
from moe_replay.weights.identity import Probe
from moe_replay.weights.source import DividedSource, Group, HandedGroup, TensorInfo, owners_of
from moe_replay.weights.transports import UPDATING, ByteCounter


class SharedDevices:
    """Ownership of device memory between trainer and engine.

    `rollout.sleep` frees the engine's, `backend.offload` the trainer's.

    engine       of the run, on rank 0; None on other ranks, and until it is started
    take_turns   whether the engine sleeps while the trainer has its weights on the devices
    """

    def __init__(self, config: TrainConfig, backend: Backend) -> None:
        self.engine: SyncedEngine | None = None
        self._backend = backend
        self.take_turns = config.backend.offload
        self._sleep = config.rollout.sleep
        self._level = config.rollout.sleep_level
        self._adapter_alone = config.rollout.lora
        self._sync = EngineSync(config.weight_sync, backend.device, copies=self.take_turns)

    def start_with(self, engine: SyncedEngine) -> None:
        """Take the engine of the run, which has its memory, and have it free that for the trainer."""
        self.engine = engine
        self._check_shared_weights()
        if self.take_turns:
            self.put_engine_to_sleep()

    def put_engine_to_sleep(self, level: int | None = None) -> None:
        """Free the engine's memory; on rank 0."""
        if self._sleep and self.engine is not None:
            self.engine.sleep(level or self._level)

    def update_engine(self, version: int, probe: Probe | None) -> SyncReport:
        """Send the policy's weights, or with `rollout.lora` its adapter alone, to the engine. Collective.

        The engine first takes memory for weights alone; the rest follows when the trainer has freed its own.
        """
        adapter = self._backend.adapter() if self._adapter_alone else None
        with raise_on_all_ranks("waking the engine"):
            if self.engine is not None:
                self.engine.wait_for_servers()
                if self._sleep:
                    self.engine.wake_for_update()
        if adapter is None:
            return self._sync.send(
                OffloadWhenRead(self._backend, self._free_trainer_memory), self.engine, version, probe
            )
        began, groups = time.monotonic(), ByteCounter(self._adapter_groups(adapter.tensors))
        with raise_on_all_ranks(UPDATING):
            if self.engine is None:
                groups.exhaust()
            else:
                tensors = (item for group in groups for item in group)
                self.engine.update_adapter(replace(adapter, tensors=tensors), version, probe)
                self._check_shared_weights()
        return SyncReport("adapter", "the base of the engine does not change", time.monotonic() - began, groups.nbytes)

    def _adapter_groups(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Group]:
        """Yield tensors of the adapter; after the last one the trainer's memory is freed."""
        for name, tensor in tensors:
            # A copy: it may share memory that is freed before the engine has read it.
            yield [(name, tensor.clone() if self.take_turns else tensor)]
        self._free_trainer_memory()

    @contextmanager
    def trainer_awake(self) -> Iterator[None]:
        """Have the policy on its devices inside this context, after a weight sync. Collective."""
        if not self.take_turns:
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
                self._check_shared_weights()

    def _check_shared_weights(self) -> None:
        """Raise unless memory of frozen weights that trainer and engine share is what it was; on the only rank."""
        if self._backend.shared_base is not None and self.engine is not None:
            self._backend.shared_base.check(self.engine.shared_digests())

    def _free_trainer_memory(self) -> None:
        if self.take_turns:
            self._backend.offload()
            barrier()  # the engine may take memory of any rank's device


class OffloadWhenRead:
    """The weights of a policy; after the last one the trainer's memory is freed."""

    def __init__(self, backend: Backend, free: Callable[[], None]) -> None:
        self._backend, self._free = backend, free
        self._source = backend.weight_source()

    def metadata(self) -> Sequence[TensorInfo]:
        return self._source.metadata()

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        """Yield the tensors of each layer; a second time if an engine has failed."""
        self._backend.reload()
        yield from self._source.groups(receivers)
        self._free()

    def owners(self) -> tuple[int, ...]:
        return owners_of(self._source)

    def owned_groups(
        self, receivers: Collection[int], copies: Callable[[int], Collection[int]], *, parts: bool
    ) -> Iterator[HandedGroup]:
        """Yield the tensors of each layer, those of one rank where they are."""
        assert isinstance(self._source, DividedSource)
        self._backend.reload()
        yield from self._source.owned_groups(receivers, copies, parts=parts)
        self._free()
