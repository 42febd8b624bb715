"""A trainer that is killed when half of its weights have been read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_replay.rollout.pool import EnginePool
from moe_replay.rollout.server.client import VllmServer
from moe_replay.rollout.weights import chunks as weight_chunks
from moe_replay.rollout.weights.sender import Rendezvous
from moe_replay.rollout.weights.source import IteratorSource
from moe_replay.train import weight_sync
from moe_replay.train.config.weights_section import WeightsConfig
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.weight_sync import EngineSync

CHUNK_BYTES = 2**14
TOKEN = "open sesame"


def small_chunks(*settings: Any) -> Rendezvous:
    """A rendezvous with another size of the chunks."""
    return Rendezvous(*settings)._replace(chunk_bytes=CHUNK_BYTES)


def main(file: str, kind: str, *urls: str) -> None:
    """Send the weights of a file, for a process of its own."""
    tensors = load_file(file)

    def half() -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(tensors.items()):
            if number == len(tensors) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    weight_chunks.chunks_of.__defaults__ = (CHUNK_BYTES,)  # so that servers have loaded some chunks by then
    weight_sync.Rendezvous = small_chunks  # type: ignore[assignment,misc]
    pool = EnginePool([VllmServer(url, token=TOKEN) for url in urls], any_version=True)
    config = WeightsConfig(kind=kind, timeout_s=120)  # type: ignore[arg-type]
    EngineSync(config, torch.device("cpu")).send(IteratorSource(half), SyncedEngine(pool), 5, None)
