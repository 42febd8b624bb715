"""What a rank does to send a policy's weights to rollout servers, by every kind in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_replay.engines.pool import EnginePool
from moe_replay.engines.server.client import RolloutClient
from moe_replay.train.config.sections import WeightSyncConfig
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.sync.weight_sync import EngineSync
from moe_replay.weights.source import DividedSource
from tests.distributed.megatron_training import make_config, open_backend
from tests.distributed.weight_sources import LiveMemory

CHUNK_BYTES = 2**15  # less than the model has, so that there are several chunks
CPU = torch.device("cpu")


def send(
    folder: str, backend_kind: str, settings: dict[str, Any], updates: list[tuple[str, list[str]]], token: str
) -> list[dict[str, Any]]:
    """Send the weights once for each (kind, URLs): the report of each, and the memory that it took on this rank."""
    backend = open_backend(make_config(folder, backend_kind, **settings))
    rank = dist.get_rank()
    found = []
    with ExitStack() as stack:
        for module in ("train.sync.weight_sync", "weights.sender"):
            stack.enter_context(mock.patch(f"moe_replay.{module}.device_id", return_value=f"gpu {rank}"))
        for version, (kind, urls) in enumerate(updates, start=1):
            config = WeightSyncConfig(transport=kind, timeout_s=240).model_copy(
                update={"chunk_mib": CHUNK_BYTES / 2**20}
            )
            engine = None
            if rank == 0:
                clients = [RolloutClient(url, token=token) for url in urls]
                engine = SyncedEngine(stack.enter_context(EnginePool(clients, any_version=True, max_backoff_s=0.1)))
            source = backend.weight_source()
            with LiveMemory() as memory, given_by_others(source) as given:
                report = EngineSync(config, CPU).send(source, engine, version, None)
            kinds = {"kind": report.transport, "reason": report.reason}
            found.append({**kinds, "nbytes": report.nbytes, "peak": memory.peak, "of_others": sum(given)})
    return found


@contextmanager
def given_by_others(source: Any) -> Iterator[list[int]]:
    """Sizes of the tensors that this rank gets though another one holds them alone."""
    sizes: list[int] = []

    def owned_groups(*args: Any, **options: Any) -> Iterator[Any]:
        for handed in groups(*args, **options):
            if handed.owner not in (None, dist.get_rank()):
                sizes.extend(tensor.nbytes for _, tensor in handed.tensors)
            yield handed

    if not isinstance(source, DividedSource):
        yield sizes
        return
    groups = source.owned_groups
    with mock.patch.object(source, "owned_groups", owned_groups):
        yield sizes
