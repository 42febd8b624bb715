"""A trainer that is killed when half of its weights have been read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_replay.engines.pool import EnginePool
from moe_replay.engines.server.client import RolloutClient
from moe_replay.train.config.sections import WeightSyncConfig
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.sync.weight_sync import EngineSync
from moe_replay.weights import checkpoint as weight_chunks
from tests.support.weight_sources import IteratorSource

CHUNK_BYTES = 2**14
TOKEN = "open sesame"


def main(file: str, kind: str, *urls: str) -> None:
    """Send the weights of a file, for a process of its own."""
    tensors = load_file(file)

    def half() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    weight_chunks.chunks_of.__defaults__ = (CHUNK_BYTES,)  # so that servers have loaded some chunks by then
    pool = EnginePool([RolloutClient(url, token=TOKEN) for url in urls], any_version=True)
    config = WeightSyncConfig(transport=kind, timeout_s=120).model_copy(update={"chunk_mib": CHUNK_BYTES / 2**20})
    EngineSync(config, torch.device("cpu")).send(IteratorSource(half), SyncedEngine(pool), 5, None)
