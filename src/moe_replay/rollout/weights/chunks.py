"""Weights for several engines at once: read and serialised once, and sent to all of them side by side."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from moe_replay.rollout.engine import Engine
from moe_replay.rollout.types import Probe, Tensors

if TYPE_CHECKING:  # it needs pydantic, which whoever only samples can do without
    from moe_replay.rollout.weights.delta import Changes, SentWeights

CHUNK_BYTES = 64 * 2**20


class WeightChunk:
    """Some tensors in host memory, serialised once for however many engines.

    changes   of the tensors since the last update, where they are sent instead
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.changes: Changes | None = None
        self._content: bytes | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

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

    keep      the receiver is to keep a copy, for updates with changes alone
    base_id   of the update that the chunks' changes refer to; empty: they have none
    nbytes    size of the tensors, or of their changes, that have been read for the engine so far
    """

    def __init__(self, chunks: Iterator[WeightChunk], *, keep: bool = False, base_id: str = "") -> None:
        self._chunks, self.keep, self.base_id = chunks, keep, base_id
        self.nbytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.whole():
            yield from chunk.tensors.items()

    def whole(self) -> Iterator[WeightChunk]:
        """Yield chunks whose tensors are sent."""
        for chunk in self._chunks:
            self.nbytes += chunk.nbytes
            yield chunk

    def changes(self) -> Iterator[Changes]:
        """Yield the changes of the chunks, which are sent in place of the tensors."""
        for chunk in self._chunks:
            assert chunk.changes is not None, "a stream with a base has changes"
            self.nbytes += chunk.changes.nbytes
            yield chunk.changes


def packed(weights: Iterable[tuple[str, Tensor]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the tensors as safetensors files of about `chunk_bytes`; a larger tensor has a file of its own."""
    chunks = weights.whole() if isinstance(weights, ChunkStream) else chunks_of(weights, chunk_bytes)
    for chunk in chunks:
        yield chunk.content


class _ChunkQueue:
    """Chunks on their way to one engine. One waits at most, so that a slow engine slows the producer."""

    def __init__(self, sent: SentWeights | None) -> None:
        self._keep, self._base_id = sent is not None, "" if sent is None else sent.base_id
        self._chunks: queue.Queue[WeightChunk | None] = queue.Queue(maxsize=1)
        self._update_ended = threading.Event()

    def update(self, engine: Engine, version: int, probe: Probe | None, weights_id: str) -> int:
        """Update the engine from the queue and return the bytes that it was sent.

        The producer is unblocked whether that succeeds or fails.
        """
        stream = ChunkStream(self._dequeue(), keep=self._keep, base_id=self._base_id)
        try:
            engine.update_weights(stream, version, probe, weights_id)
            return stream.nbytes
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


def update_side_by_side(
    engines: Sequence[Engine],
    weights: Tensors | Path,
    version: int,
    probe: Probe | None,
    weights_id: str,
    sent: SentWeights | None = None,
) -> list[Future[int]] | list[Future[None]]:
    """Update all engines at once and return how that ended for each: with the bytes that it was sent, or an error.

    Of a folder no bytes are known. An iterator is read once, in the caller's thread: reading it may be collective.

    sent   the weights of the last update, whose changes are sent to engines that have kept it
    """
    with ThreadPoolExecutor(len(engines) or 1) as threads:
        if isinstance(weights, Path):
            return [threads.submit(one.update_weights, weights, version, probe, weights_id) for one in engines]
        if sent is not None:
            sent.begin()
        queues = [_ChunkQueue(sent) for _ in engines]
        updates = [
            threads.submit(each.update, engine, version, probe, weights_id)
            for each, engine in zip(queues, engines, strict=True)
        ]
        try:
            for chunk in chunks_of(weights):
                if sent is not None:
                    chunk.changes = sent.changes(chunk.tensors)
                for each in queues:
                    each.put(chunk)
            if sent is not None:
                sent.end(weights_id)
        finally:
            for each in queues:
                each.put(None)
    return updates
