"""What a rank does to send a policy's weights to rollout servers, by every kind in turn."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_replay.rollout.pool import EnginePool
from moe_replay.rollout.server.client import VllmServer
from moe_replay.rollout.vllm.layer_shares import LayerShares, partition
from moe_replay.rollout.weights.sender import Rendezvous
from moe_replay.rollout.weights.source import WeightSource
from moe_replay.train.config.weights_section import WeightsConfig
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.weight_sync import EngineSync
from tests.distributed.megatron_training import make_config, open_backend

CHUNK_BYTES = 2**15  # less than the model has, so that there are several chunks
CPU = torch.device("cpu")
LIMIT = timedelta(seconds=240)


def small_chunks(*settings: Any) -> Rendezvous:
    """A rendezvous with another size of the chunks."""
    return Rendezvous(*settings)._replace(chunk_bytes=CHUNK_BYTES)


def send(
    folder: str, backend_kind: str, settings: dict[str, Any], updates: list[tuple[str, list[str]]], token: str
) -> list[dict[str, Any]]:
    """Send the weights once for each (kind, URLs): the report of each, and this rank's share of the weights."""
    backend = open_backend(make_config(folder, backend_kind, **settings))
    rank = dist.get_rank()
    found = []
    with ExitStack() as stack:
        for module in ("train.weight_sync", "rollout.weights.sender"):
            stack.enter_context(mock.patch(f"moe_replay.{module}.device_id", return_value=f"gpu {rank}"))
        stack.enter_context(mock.patch("moe_replay.train.weight_sync.Rendezvous", small_chunks))
        for version, (kind, urls) in enumerate(updates, start=1):
            config = WeightsConfig(kind=kind, timeout_s=240)  # type: ignore[arg-type]
            engine = None
            if rank == 0:
                clients = [VllmServer(url, token=token) for url in urls]
                engine = SyncedEngine(stack.enter_context(EnginePool(clients, any_version=True, max_backoff_s=0.1)))
            report = EngineSync(config, CPU).send(backend.weight_source(), engine, version, None)
            found.append({"kind": report.kind, "nbytes": report.nbytes})
    return [*found, share(backend.weight_source(), f"{folder}/pulls")]


def share(source: WeightSource, pulls: str) -> dict[str, Any]:
    """Read this rank's share as vLLM's trainer side of `sharded_rdt` does.

    It asks for the groups that it holds and no further, and for none while two are not pulled yet; rank 0 ends when the
    servers have pulled all groups, in their order.

    pulls   file that says which groups are there, and which have been pulled
    """
    shares = LayerShares(source)
    every = partition([info.name for info in shares.metadata()])
    store = dist.FileStore(pulls, -1)
    servers = threading.Thread(target=pull, args=(dist.FileStore(pulls, -1), len(every)))
    if dist.get_rank() == 0:
        servers.start()
    groups, waiting, tensors = shares.iter_groups(), [], {}
    for expected in shares.groups():
        while len(waiting) > 1:
            store.wait([f"pulled/{waiting.pop(0)}"], LIMIT)
        names, of_group = next(groups)
        assert names == expected
        tensors |= {name: tensor.clone() for name, tensor in zip(names, of_group, strict=True)}
        waiting.append(every.index(expected))
        store.set(f"published/{waiting[-1]}", "")
    store.wait([f"pulled/{number}" for number in waiting], LIMIT)
    if dist.get_rank() == 0:
        servers.join()
    shares.finish()
    return {"held": list(shares.held_names()), "names": [info.name for info in shares.metadata()], "tensors": tensors}


def pull(store: dist.Store, groups: int) -> None:
    """Pull one group after the other, as servers do."""
    for number in range(groups):
        store.wait([f"published/{number}"], LIMIT)
        store.set(f"pulled/{number}", "")
