"""What a rank does to send a policy's weights to rollout servers, by every kind in turn."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_replay.rollout.layer_shares import LayerShares
from moe_replay.rollout.pool import EnginePool
from moe_replay.rollout.vllm_server import VllmServer
from moe_replay.rollout.weight_sender import Meeting
from moe_replay.rollout.weight_source import WeightSource
from moe_replay.train.config.weights_section import WeightsConfig
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.weight_sync import EngineSync
from tests.distributed.megatron_training import make_config, open_backend

CHUNK_BYTES = 2**15  # less than the model has, so that there are several chunks
CPU = torch.device("cpu")


def small_chunks(*settings: Any) -> Meeting:
    """A meeting with another size of the chunks."""
    return Meeting(*settings)._replace(chunk_bytes=CHUNK_BYTES)


def send(
    folder: str, backend_kind: str, settings: dict[str, Any], updates: list[tuple[str, list[str]]], token: str
) -> list[dict[str, Any]]:
    """Send the weights once for each (kind, URLs): the report of each, and this rank's share of the weights."""
    backend = open_backend(make_config(folder, backend_kind, **settings))
    rank = dist.get_rank()
    found = []
    with ExitStack() as stack:
        for module in ("train.weight_sync", "rollout.weight_sender"):
            stack.enter_context(mock.patch(f"moe_replay.{module}.device_id", return_value=f"gpu {rank}"))
        stack.enter_context(mock.patch("moe_replay.train.weight_sync.Meeting", small_chunks))
        for version, (kind, urls) in enumerate(updates, start=1):
            config = WeightsConfig(kind=kind, timeout_s=240)  # type: ignore[arg-type]
            engine = None
            if rank == 0:
                clients = [VllmServer(url, token=token) for url in urls]
                engine = SyncedEngine(stack.enter_context(EnginePool(clients, any_version=True)))
            report = EngineSync(config, CPU).send(backend.weight_source(), engine, version, None)
            found.append({"kind": report.kind, "nbytes": report.nbytes})
    return [*found, share(backend.weight_source())]


def share(source: WeightSource) -> dict[str, Any]:
    """Read this rank's share as vLLM's trainer side does, which asks for the groups that it holds and no further."""
    shares = LayerShares(source)
    groups, tensors = shares.iter_groups(), {}
    for expected in shares.groups():
        names, of_group = next(groups)
        assert names == expected
        tensors |= {name: tensor.clone() for name, tensor in zip(names, of_group, strict=True)}
    shares.finish()
    return {"held": list(shares.held_names()), "names": [info.name for info in shares.metadata()], "tensors": tensors}
