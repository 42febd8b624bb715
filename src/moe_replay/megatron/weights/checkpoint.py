"""Transformers checkpoint folders: `config.json` and one safetensors file, or several with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.tensor_slices import Shape, Slices
from moe_replay.utils.files import apply_umask

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 2**30
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}


class Checkpoint:
    """A checkpoint folder that is read lazily: headers first, then only the requested slices of tensors."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = self._json("config.json")
        if "quantization_config" in self.config:
            raise WeightMapError(
                "a quantized checkpoint cannot be loaded into Megatron-Core",
                found=self.config["quantization_config"],
                remedy="Convert it to bfloat16 first",
            )

    def _file(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise WeightMapError("not a checkpoint folder", expected=name, found=self.folder)
        return path

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads(self._file(name).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise WeightMapError(f"{self.folder / name} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise WeightMapError(f"{self.folder / name} is not a JSON object", found=type(content).__name__)
        return content

    def _open(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self._file(name), framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightMapError(
                f"{self.folder / name} is damaged or cut short", found=error, remedy="Copy or download it again"
            ) from error

    @property
    def model_type(self) -> str:
        """`model_type` of the config."""
        return self.config.get("model_type", "")

    @cached_property
    def _files(self) -> dict[str, Any]:
        """Open safetensors file of each tensor, by tensor name."""
        if (self.folder / INDEX).is_file():
            listed = self._weight_map()
        else:
            listed = dict.fromkeys(self._open("model.safetensors").offset_keys(), "model.safetensors")
        files = {name: self._open(name) for name in sorted(set(listed.values()))}
        stored = {name: file for file in files.values() for name in file.offset_keys()}
        if stored.keys() != listed.keys():
            different = sorted(stored.keys() ^ listed.keys())
            raise WeightMapError(
                f"{INDEX} does not match the safetensors files", expected=f"{len(listed)} tensors", found=different[:3]
            )
        return stored

    def _weight_map(self) -> dict[str, str]:
        """Return the file of each tensor, as the index lists them."""
        listed = self._json(INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise WeightMapError(f"{self.folder / INDEX} lists no files", expected='"weight_map": {tensor: file, ...}')
        return listed

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    @cached_property
    def is_fused(self) -> bool:
        """Whether the experts of a layer are stored in one tensor."""
        return any(name.endswith(".experts.gate_up_proj") for name in self._files)

    def shape(self, name: str) -> Shape:
        """Return the shape of one tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor."""
        return self.read(name, tuple(slice(0, 0) for _ in self.shape(name))).dtype

    def read(self, name: str, slices: Slices) -> Tensor:
        """Read a slice of one tensor, and nothing else of it."""
        return self._files[name].get_slice(name)[slices]


class CheckpointWriter:
    """Writes tensors as they arrive, in files of at most `file_bytes`, and the index on close."""

    def __init__(self, folder: str | Path, file_bytes: int = FILE_BYTES) -> None:
        self.folder = Path(folder)
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
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor; it stays in memory until its file is written."""
        if self._pending and sum(t.nbytes for t in self._pending.values()) + tensor.nbytes > self._file_bytes:
            self._flush()
        # safetensors refuses tensors that share memory, as slices of one parameter do: copy them
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._total += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._pending, self._part(len(self._files)), metadata={"format": "pt"})
        apply_umask(self._part(len(self._files)))
        self._files.append(list(self._pending))
        self._pending = {}

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.unfinished"

    def close(self, like: Path) -> None:
        """Rename the files to their final names, and copy config and tokenizer files from another checkpoint."""
        self._flush()
        count = len(self._files)
        names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            self._part(number).rename(self.folder / name)
        if count > 1:
            weight_map = {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for path in _config_and_tokenizer_files(like):
            shutil.copyfile(path, self.folder / path.name)


def write_folder(
    tensors: Iterable[tuple[str, Tensor]], folder: str | Path, like: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Write tensors as a checkpoint folder on rank 0; config and tokenizer are copied from the checkpoint `like`.

    A collective call: all ranks iterate over all tensors, even after a failed write, since ranks gather them jointly.
    """
    from safetensors import SafetensorError

    writer = CheckpointWriter(folder, file_bytes) if not dist.is_initialized() or dist.get_rank() == 0 else None
    failure: OSError | SafetensorError | None = None
    for name, tensor in tensors:
        if writer is not None and failure is None:
            try:
                writer.add(name, tensor)
            except (OSError, SafetensorError) as error:
                failure = error
    if failure is not None:
        raise failure
    if writer is not None:
        writer.close(like)


def _config_and_tokenizer_files(folder: Path) -> Iterable[Path]:
    return (
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json")
    )
