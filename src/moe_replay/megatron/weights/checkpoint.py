"""Transformers checkpoint folders: `config.json` and one safetensors file, or several with an index."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.tensor_slices import Shape, Slices

INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 2**30
"""Most bytes of tensors in a file that is written."""


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
