"""A Transformers checkpoint folder: `config.json` and safetensors files, in one or in several with an index."""

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

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 2**30
_BESIDE_WEIGHTS = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"}


class Checkpoint:
    """Reads the headers of a folder at once, and of its tensors only what is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: dict[str, Any] = json.loads(self._file("config.json").read_text())
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

    @property
    def model_type(self) -> str:
        """The family, in Transformers' words."""
        return self.config.get("model_type", "")

    @cached_property
    def _where(self) -> dict[str, Any]:
        """Tensor -> the open file that holds it."""
        from safetensors import safe_open

        index = self.folder / INDEX
        if index.is_file():
            promised = json.loads(index.read_text())["weight_map"]
        else:
            with safe_open(self._file("model.safetensors"), framework="pt") as whole:
                promised = dict.fromkeys(whole.offset_keys(), "model.safetensors")
        files = {name: safe_open(self._file(name), framework="pt") for name in sorted(set(promised.values()))}
        held = {name: file for file in files.values() for name in file.offset_keys()}
        if held.keys() != promised.keys():
            apart = sorted(held.keys() ^ promised.keys())
            raise WeightMapError(f"{INDEX} and the files beside it differ", expected=len(promised), found=apart[:3])
        return held

    @property
    def names(self) -> set[str]:
        """Every tensor."""
        return set(self._where)

    @cached_property
    def is_fused(self) -> bool:
        """Whether the experts of a layer lie in one tensor."""
        return any(name.endswith(".experts.gate_up_proj") for name in self._where)

    def shape(self, name: str) -> Shape:
        """Of one tensor."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Of one tensor."""
        return self.read(name, tuple(slice(0, 0) for _ in self.shape(name))).dtype

    def read(self, name: str, region: Slices) -> Tensor:
        """A region of one tensor; nothing else of it is read."""
        return self._where[name].get_slice(name)[region]


class CheckpointWriter:
    """Writes tensors as they come, in files of some gigabytes, and the index when it is closed."""

    def __init__(self, folder: str | Path, file_bytes: int = FILE_BYTES) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if present := sorted(path.name for path in self.folder.glob("*.safetensors")):
            raise WeightMapError(
                "the folder holds weights already, and a reader would take both", expected="none", found=present[:3]
            )
        self._file_bytes = file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """One tensor, whose memory is kept until its file is full."""
        if self._waiting and sum(t.nbytes for t in self._waiting.values()) + tensor.nbytes > self._file_bytes:
            self._flush()
        # safetensors refuses tensors that share memory: parts of one parameter get memory of their own
        self._waiting[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._total += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self._waiting, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._waiting))
        self._waiting = {}

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number}.unfinished"

    def close(self, beside: Path) -> None:
        """Give the files their names, and copy what lies beside the weights in another checkpoint."""
        self._flush()
        count = len(self._files)
        names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            self._part(number).rename(self.folder / name)
        if count > 1:
            weight_map = {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for path in _files_beside_weights(beside):
            shutil.copyfile(path, self.folder / path.name)


def write_folder(
    tensors: Iterable[tuple[str, Tensor]], folder: str | Path, like: Path, file_bytes: int = FILE_BYTES
) -> None:
    """These tensors as a folder like the checkpoint `like`, whose config and tokenizer are copied.

    The first rank writes. All ranks call it, and take all tensors also where writing fails: ranks gather them together.
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


def _files_beside_weights(folder: Path) -> Iterable[Path]:
    return (
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in _BESIDE_WEIGHTS and not path.name.endswith(".index.json")
    )
