"""One update of the weights for all engines of a pool: tensors are read and serialised once, and sent side by side."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moe_replay.rollout.adapter import Adapter, adapter_update
from moe_replay.rollout.engine import Engine
from moe_replay.rollout.types import Probe
from moe_replay.rollout.weights.chunks import ChunkStream, WeightChunk, chunks_of
from moe_replay.rollout.weights.types import Tensors

if TYPE_CHECKING:  # it needs pydantic, which sampling alone does not
    from moe_replay.rollout.weights.delta import SentWeights


class _ChunkQueue:
    """Chunks on their way to one engine. One waits at most, so that a slow engine slows the producer."""

    def __init__(self, sent: SentWeights | None) -> None:
        self._keep, self._base_id = sent is not None, "" if sent is None else sent.base_id
        self._chunks: queue.Queue[WeightChunk | None] = queue.Queue(maxsize=1)
        self._update_ended = threading.Event()

    def update(
        self, engine: Engine, version: int, probe: Probe | None, weights_id: str, adapter: Adapter | None = None
    ) -> int:
        """Update the engine from the queue and return the bytes that it was sent.

        The producer is unblocked whether that succeeds or fails.

        adapter   that the chunks are the tensors of; None: they are weights
        """
        stream = ChunkStream(self._dequeue(), keep=self._keep, base_id=self._base_id)
        try:
            if adapter is None:
                engine.update_weights(stream, version, probe, weights_id)
            else:
                adapter_update(engine)(replace(adapter, tensors=stream), version, probe, weights_id)
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
    weights: Tensors | Path | Adapter,
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
        adapter = weights if isinstance(weights, Adapter) else None
        queues = [_ChunkQueue(sent) for _ in engines]
        updates = [
            threads.submit(each.update, engine, version, probe, weights_id, adapter)
            for each, engine in zip(queues, engines, strict=True)
        ]
        try:
            for chunk in chunks_of(weights.tensors if isinstance(weights, Adapter) else weights):
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
