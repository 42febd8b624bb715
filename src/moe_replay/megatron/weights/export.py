"""Writing Transformers checkpoint folders: the ranks share the layers, and each writes its own files.

No rank ever holds more than its share: a layer goes to one rank, the next layer to the next rank.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_replay.distributed.ranks import all_gather_text, barrier, raise_on_all_ranks, rank, world_size
from moe_replay.megatron.weights.block_scales import KEY
from moe_replay.megatron.weights.checkpoint import FILE_BYTES, INDEX
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.rollout.weights.source import Turns, WeightSource
from moe_replay.utils.files import Write, apply_umask

_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}


class CheckpointWriter:
    """Takes the tensors of this rank as they arrive, in files of at most `file_bytes`.

    folder   None: all files stay in memory until `finished` is written; else each is written as soon as it is full
    """

    def __init__(self, folder: str | Path | None, file_bytes: int = FILE_BYTES) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if present := sorted(path.name for path in self.folder.glob("*.safetensors")):
                raise WeightMapError(
                    "the folder already contains weights, which a reader would mix with the new ones",
                    expected="no safetensors files",
                    found=present[:3],
                    remedy="Choose an empty folder",
                )
        self._file_bytes = file_bytes
        self._pending: dict[str, Tensor] = {}
        self._full: list[dict[str, Tensor] | Path] = []
        self._sizes: list[dict[str, int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor; it stays in memory until its file is written."""
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self._file_bytes:
            self._flush()
        # safetensors refuses tensors that share memory, as slices of one parameter do: copy them
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def _flush(self) -> None:
        if not self._pending:
            return
        self._sizes.append({name: tensor.nbytes for name, tensor in self._pending.items()})
        if self.folder is None:
            self._full.append(self._pending)
        else:
            part = self.folder / f"part-{rank()}-{len(self._full)}.unfinished"
            _save(self._pending, part)
            self._full.append(part)
        self._pending = {}

    def finished(self, like: Path) -> Write:
        """Return what gives all files their final names; config and tokenizer come from `like`. All ranks call it."""
        self._flush()
        sizes: list[list[dict[str, int]]] = [json.loads(text) for text in all_gather_text(json.dumps(self._sizes))]
        count = sum(map(len, sizes))
        names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        number = rank()
        first = sum(map(len, sizes[:number]))
        own = dict(zip(names[first : first + len(self._full)], self._full, strict=True))
        index = None
        if count > 1:
            files = [file for of_rank in sizes for file in of_rank]
            weight_map = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
            total = sum(size for file in files for size in file.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return lambda folder: _write_share(folder, own, like if number == 0 else None, index)

    def close(self, like: Path) -> None:
        """Write what is not written yet. All ranks call it."""
        assert self.folder is not None
        self.finished(like)(self.folder)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    apply_umask(path)


def _write_share(
    folder: Path, own: dict[str, dict[str, Tensor] | Path], like: Path | None, index: dict[str, Any] | None
) -> list[Path]:
    """Write the files of one rank; the one with `like` also writes index, config and tokenizer."""
    folder.mkdir(exist_ok=True)
    written = [folder / name for name in own]
    for path, content in zip(written, own.values(), strict=True):
        if isinstance(content, Path):
            content.rename(path)
        else:
            _save(content, path)
    if like is None:
        return written
    if index is not None:
        written.append(folder / INDEX)
        written[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for path in _config_and_tokenizer_files(like):
        written.append(folder / path.name)
        if path.name == "config.json":
            _copy_config(path, written[-1])
        else:
            shutil.copyfile(path, written[-1])
    return written


def _copy_config(source: Path, target: Path) -> None:
    """Copy a model's config; what is written is not quantized, so it must not say so."""
    config = json.loads(source.read_text(encoding="utf-8"))
    if isinstance(config, dict) and KEY in config:
        del config[KEY]
        target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(source, target)


class _InTurn(Turns):
    """One rank for each layer, the next rank for the next layer."""

    def __init__(self) -> None:
        super().__init__([[number] for number in range(world_size())])

    def advance(self) -> None:
        """Advance to the next group, of the next rank."""
        self._number = (self._number + 1) % len(self._holders)


def stage_folder(
    source: WeightSource,
    like: Path,
    folder: Path | None = None,
    file_bytes: int = FILE_BYTES,
    *,
    extra: Iterable[tuple[str, Tensor]] = (),
) -> Write:
    """Take this rank's share of all tensors, and return what writes it. A collective call.

    folder   None: the share is held in host memory; else it is written there, file by file
    extra    tensors of this rank that the source does not have

    All ranks take all tensors, even after a failed write, since ranks gather them jointly.
    """
    from safetensors import SafetensorError

    with raise_on_all_ranks("preparing an export"):
        writer = CheckpointWriter(folder, file_bytes)
    failure: OSError | SafetensorError | None = None
    receivers = _InTurn()
    for group in source.groups(receivers):
        receivers.advance()
        for name, tensor in group:
            if failure is None:
                try:
                    writer.add(name, tensor)
                except (OSError, SafetensorError) as error:
                    failure = error
    with raise_on_all_ranks("writing an export"):
        if failure is not None:
            raise failure
        for name, tensor in extra:
            writer.add(name, tensor)
        writer._flush()
    return writer.finished(like)


def write_folder(
    source: WeightSource,
    folder: str | Path,
    like: Path,
    file_bytes: int = FILE_BYTES,
    *,
    extra: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """Write the tensors of a source as a checkpoint folder; config and tokenizer are those of `like`. A collective."""
    write = stage_folder(source, like, Path(folder), file_bytes, extra=extra)
    with raise_on_all_ranks("writing an export"):
        write(Path(folder))
    barrier()  # no rank returns before the folder is complete


def _config_and_tokenizer_files(folder: Path) -> Iterable[Path]:
    return (
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json")
    )
