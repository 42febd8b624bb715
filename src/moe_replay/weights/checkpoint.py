"""Weights in checkpoint form: streamed under their checkpoint names, in chunks, never the whole model.

Transformers 5 keeps the experts of a layer in one tensor, checkpoints have one tensor per expert. Engines read
checkpoints, so weights are sent in that form.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum, auto
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moe_replay.errors import EngineError
from moe_replay.utils.processes import owned_folder
from moe_replay.weights.source import Group, Tensors
from moe_replay.weights.transfer import TransferError

CHUNK_BYTES = 64 * 2**20
FILE_BYTES = 2**30
T = TypeVar("T")


def safetensors_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError("no weights in the folder", expected="*.safetensors", found=folder)
    return files


def read_tensors(weights: Tensors | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor once, lazily; a folder without weights raises immediately."""
    return _read_files(safetensors_files(weights)) if isinstance(weights, Path) else iter(weights)


def _read_files(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.offset_keys():
                yield name, tensors.get_tensor(name)


def as_files(chunks: Iterable[bytes]) -> Iterator[Path]:
    """Yield each chunk as a file in memory for the processes of this machine, deleted when the next one is requested.

    It has no name in any folder: it is gone with this process, however that ends, and /dev/shm, which containers keep
    small, is not used. A reader that still has the last one mapped is not disturbed.
    """
    for number, chunk in enumerate(chunks):
        with os.fdopen(os.memfd_create(f"moe-replay weights {number}"), "wb") as memory:
            memory.write(chunk)
            memory.flush()
            yield Path(f"/proc/{os.getpid()}/fd/{memory.fileno()}")


@contextmanager
def as_folder(weights: Tensors | Path, parent: Path | None) -> Iterator[Path]:
    """Yield weights as a folder of safetensors files: their own, or one in `parent` that exists within this context."""
    if isinstance(weights, Path):
        safetensors_files(weights)
        yield weights
        return
    with owned_folder(parent) as folder:
        folder.chmod(0o755)  # a server may belong to another user
        for number, chunk in enumerate(packed(weights, FILE_BYTES)):
            Path(folder, f"model-{number:05d}.safetensors").write_bytes(chunk)
        yield folder


class WeightChunk:
    """Some tensors in host memory, serialised once for however many engines."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._content: bytes | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
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
    # safetensors rejects tensors that share memory: parts of one parameter are copied
    for chunk in grouped(weights, chunk_bytes, lambda tensor: tensor.detach().to("cpu", copy=True).contiguous()):
        yield WeightChunk(dict(chunk))


def grouped(weights: Tensors, chunk_bytes: int, convert: Callable[[Tensor], Tensor]) -> Iterator[Group]:
    """Yield converted tensors, about `chunk_bytes` at a time; a larger one is alone."""
    chunk: Group = []
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append((name, convert(tensor)))
        size += tensor.nbytes
    if chunk:
        yield chunk


class ChunkStream:
    """The weights of one update for one engine, as chunks that it shares with other engines.

    Iterating over it yields (name, tensor), for engines that know nothing of chunks.

    nbytes   size of the tensors that have been read for the engine so far
    """

    def __init__(self, chunks: Iterator[WeightChunk]) -> None:
        self._chunks = chunks
        self.nbytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for chunk in self.whole():
            yield from chunk.tensors.items()

    def whole(self) -> Iterator[WeightChunk]:
        """Yield chunks whose tensors are sent."""
        for chunk in self._chunks:
            self.nbytes += chunk.nbytes
            yield chunk


def packed(weights: Iterable[tuple[str, Tensor]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the tensors as safetensors files of about `chunk_bytes`; a larger tensor has its own file."""
    chunks = weights.whole() if isinstance(weights, ChunkStream) else chunks_of(weights, chunk_bytes)
    for chunk in chunks:
        yield chunk.content


# ---- one update for several servers ----------------------------------------------------------------------------------


class _End(Enum):
    """End of the chunks."""

    COMPLETE = auto()
    BROKEN_OFF = auto()


class _ChunkQueue:
    """Chunks in flight to one server. One waits at most, so that a slow server slows the producer."""

    def __init__(self) -> None:
        self._chunks: queue.Queue[WeightChunk | _End] = queue.Queue(maxsize=1)
        self._update_ended = threading.Event()

    def run(self, update: Callable[[T, ChunkStream], None], engine: T) -> int:
        """Update the server from the queue and return the bytes that it was sent.

        The producer is unblocked whether that succeeds or fails.
        """
        stream = ChunkStream(self._read())
        try:
            update(engine, stream)
            return stream.nbytes
        finally:
            self._update_ended.set()

    def _read(self) -> Iterator[WeightChunk]:
        while not isinstance(chunk := self._chunks.get(), _End):
            yield chunk
        if chunk is _End.BROKEN_OFF:
            raise TransferError("an update of the weights broke off: not all of them could be read")

    def put(self, chunk: WeightChunk | _End) -> None:
        """Queue a chunk, or the end; dropped once the server's update has ended."""
        while not self._update_ended.is_set():
            try:
                self._chunks.put(chunk, timeout=0.1)
            except queue.Full:
                continue
            return


def send_chunks(
    engines: Sequence[T], tensors: Iterable[tuple[str, Tensor]], update: Callable[[T, ChunkStream], None]
) -> list[Future[int]]:
    """Update all servers side by side; return the bytes that each was sent, or its error.

    Tensors are serialized once for all servers, and read in the caller's thread: reading them may be collective.
    """
    with ThreadPoolExecutor(len(engines) or 1) as threads:
        queues = [_ChunkQueue() for _ in engines]
        calls = [
            threads.submit(chunk_queue.run, update, engine) for chunk_queue, engine in zip(queues, engines, strict=True)
        ]
        end = _End.BROKEN_OFF
        try:
            for chunk in chunks_of(tensors):
                for chunk_queue in queues:
                    chunk_queue.put(chunk)
            end = _End.COMPLETE
        finally:
            for chunk_queue in queues:
                chunk_queue.put(end)
    return calls


# ---- Transformers ----------------------------------------------------------------------------------------------------


def checkpoint_tensors(model: nn.Module, state: Tensors | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a live Transformers model in the names and shapes of its checkpoint, one by one.

    `state` has its full parameters if those of the model are sharded.
    """
    form = CheckpointForm(model)
    for name, tensor in model.state_dict().items() if state is None else state:
        yield from form.tensors(name, tensor).items()


class CheckpointForm:
    """Converts tensors of a live Transformers model to the names and shapes of its checkpoint.

    Transformers searches all modules of a model for the conversions that apply to it: here that is done once, not for
    every tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        conversions = _conversions(model) if can_convert() else []
        self._model = _WithConversions(model, conversions) if conversions else None

    def tensors(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the checkpoint that one tensor of the live model becomes, by name."""
        if self._model is None:
            return {name: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._model, {name: tensor})  # type: ignore[arg-type]


def load_into(model: nn.Module, weights: Tensors) -> None:
    """Copy all weights in place, under the names of the checkpoint or of the live model; raise if any is missing."""
    live, form = model.state_dict(), CheckpointForm(model)
    described = {name: form.tensors(name, t.to("meta")) for name, t in live.items()}
    parts = {name: list(tensors) for name, tensors in described.items()}
    shapes = {part: tensor.shape for tensors in described.values() for part, tensor in tensors.items()}
    owner = {part: name for name, names in parts.items() for part in names}
    if len(owner) < sum(map(len, parts.values())):
        raise EngineError(
            "a tensor of this model's checkpoint is split in the live model, which cannot be updated in place",
            found=type(model).__name__,
            remedy="Use vLLM as the rollout engine of this model",
        )
    incomplete: dict[str, dict[str, Tensor]] = {}
    written: set[int] = set()
    for name, tensor in weights:
        target = name if name in live else owner.get(name)
        if target is None:
            raise EngineError("no such parameter in the model", found=name, expected=f"one of {len(owner)} names")
        if name in live and parts[name] != [name]:  # the live model's own, fused form
            _copy(live[name], tensor, name)
        else:
            _check_shape(shapes[name], tensor, name)
            group = incomplete.setdefault(target, {})
            group[name] = tensor
            if len(group) < len(parts[target]):
                continue
            _copy(live[target], model_tensor(model, target, incomplete.pop(target)), target)
        written.add(live[target].data_ptr())
    missing = [name for name, tensor in live.items() if tensor.data_ptr() not in written]  # tied ones share memory
    if missing:
        raise EngineError(
            "the update left parameters as they were",
            expected=f"all of {len(live)}",
            found=f"{len(missing)} missing, among them {', '.join(missing[:3])}",
            remedy="An update must have every weight, frozen ones included",
        )


def _check_shape(expected: torch.Size, tensor: Tensor, name: str) -> None:
    if expected != tensor.shape:
        raise EngineError(f"wrong shape of {name}", expected=tuple(expected), found=tuple(tensor.shape))


def _copy(target: Tensor, source: Tensor, name: str) -> None:
    _check_shape(target.shape, source, name)
    with torch.no_grad():
        target.copy_(source)


# ---- Transformers 5 ---------------------------------------------------------------------------------------------


class _WithConversions:
    """A model with the conversions of a loaded one, which Transformers then does not search for."""

    def __init__(self, model: nn.Module, conversions: list[Any]) -> None:
        self._model, self._weight_conversions = model, conversions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _conversions(model: Any) -> list[Any]:
    """Return the conversions that Transformers reverts when it saves a model, in the order of loading."""
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    attached = getattr(model, "_weight_conversions", None)
    if attached is not None:
        return attached
    prefixes = getattr(core_model_loading, "PrefixChange", ())  # only a loaded model knows whether it had the prefix
    return [
        conversion
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(conversion, prefixes)
    ]


def model_tensor(model: Any, target: str, parts: dict[str, Tensor]) -> Tensor:
    """Return the tensor of the live model that these checkpoint tensors make up."""
    if list(parts) == [target]:
        return parts[target]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern: dict[str, Any] = {p: converter for converter in converters for p in converter.source_patterns}
    renamed = {name: rename_source_key(name, renamings, converters) for name in sorted(parts, key=dot_natural_key)}
    _, first_pattern = next(iter(renamed.values()))
    if first_pattern is None:  # renamed only
        return next(iter(parts.values()))
    converter = by_pattern[first_pattern]
    for name, (new_name, pattern) in renamed.items():
        converter.add_tensor(new_name, name, pattern, parts[name])
    converted = converter.convert(target, model=model, config=model.config)[target]
    return converted[0] if isinstance(converted, list) else converted


def can_convert() -> bool:
    """Whether this version of Transformers converts checkpoints, and can compute the buffers that they do not hold."""
    return find_spec("transformers.core_model_loading") is not None
