"""Chunks of weights on their way to engines: each is serialised once, for however many engines."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # it needs pydantic, which sampling alone does not
    from moe_replay.rollout.weights.delta import Changes

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
    """Yield the tensors as safetensors files of about `chunk_bytes`; a larger tensor has its own file."""
    chunks = weights.whole() if isinstance(weights, ChunkStream) else chunks_of(weights, chunk_bytes)
    for chunk in chunks:
        yield chunk.content
