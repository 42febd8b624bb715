"""Weights for several engines at once: read and serialised once, and sent to all of them side by side."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from moe_replay.rollout.engine import Engine
from moe_replay.rollout.types import Probe, Weights

CHUNK_BYTES = 64 * 2**20


class WeightChunk:
    """Some tensors in host memory, serialised once for however many engines."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._content: bytes | None = None
        self._lock = threading.Lock()

    @property
    def content(self) -> bytes:
        """The tensors as a safetensors file."""
        from safetensors.torch import save

        with self._lock:
            if self._content is None:
                self._content = save(self.tensors)
            return self._content


def chunks_of(weights: Iterable[tuple[str, Tensor]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[WeightChunk]:
    """Yield copies of the tensors in host memory, about `chunk_bytes` at a time; a larger one is alone in its chunk."""
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if tensors and size + tensor.nbytes > chunk_bytes:
            yield WeightChunk(tensors)
            tensors, size = {}, 0
        # safetensors rejects tensors that share memory: parts of one parameter are copied
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if tensors:
        yield WeightChunk(tensors)


class ChunkStream:
    """The weights of one update for one engine, as chunks that it shares with other engines.

    Iterating over it yields (name, tensor), for engines that know nothing of chunks.
    """

    def __init__(self, chunks: Iterator[WeightChunk]) -> None:
        self.chunks = chunks

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.chunks:
            yield from chunk.tensors.items()


def packed(weights: Iterable[tuple[str, Tensor]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the tensors as safetensors files of about `chunk_bytes`; a larger tensor has a file of its own."""
    chunks = weights.chunks if isinstance(weights, ChunkStream) else chunks_of(weights, chunk_bytes)
    for chunk in chunks:
        yield chunk.content


class ChunkQueue:
    """Chunks on their way to one engine. One waits at most, so that a slow engine slows the producer."""

    def __init__(self, weights: Weights) -> None:
        self._folder = weights if isinstance(weights, Path) else None
        self._chunks: queue.Queue[WeightChunk | None] = queue.Queue(maxsize=1)
        self._update_ended = threading.Event()

    def update(self, engine: Engine, version: int, probe: Probe | None, weights_id: str) -> None:
        """Update the engine from the queue; the producer is unblocked whether that succeeds or fails."""
        try:
            engine.update_weights(self._folder or ChunkStream(self._dequeue()), version, probe, weights_id)
        finally:
            self._update_ended.set()

    def put(self, chunk: WeightChunk | None) -> None:
        """Queue a chunk, or None as the end; dropped once the engine's update has ended."""
        while not self._update_ended.is_set():
            try:
                self._chunks.put(chunk, timeout=0.1)
            except queue.Full:
                continue
            return

    def _dequeue(self) -> Iterator[WeightChunk]:
        while (chunk := self._chunks.get()) is not None:
            yield chunk


def broadcast_chunks(weights: Weights, queues: Sequence[ChunkQueue]) -> None:
    """Read an iterator of weights once, in the caller's thread: reading it may be a collective operation."""
    if isinstance(weights, Path):
        return
    try:
        for chunk in chunks_of(weights):
            for each in queues:
                each.put(chunk)
    finally:
        for each in queues:
            each.put(None)
