"""Transformers checkpoint folders: `config.json` and one safetensors file, or several with an index."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_replay.megatron.weights import block_scales
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
        self._block = block_scales.block_size(self.config)

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

    @cached_property
    def _scales(self) -> dict[str, str]:
        """Name of the scales of each tensor in 8 bits, by tensor name; empty if nothing is quantized."""
        if self._block is None:
            return {}
        scales = {}
        for name in self._files:
            if str(self._files[name].get_slice(name).get_dtype()).startswith("F8"):
                scale, wanted = name + block_scales.SUFFIX, block_scales.scale_shape(self.shape(name), self._block)
                found = self.shape(scale) if scale in self._files else None
                if found != wanted:
                    problem = f"the scales of {name} in {self.folder} are missing or do not fit"
                    raise WeightMapError(problem, expected=f"{scale} of shape {wanted}", found=found)
                scales[name] = scale
        return scales

    @property
    def names(self) -> set[str]:
        """Names of all tensors, scales of quantized ones excluded."""
        return set(self._files) - set(self._scales.values())

    @cached_property
    def is_fused(self) -> bool:
        """Whether the experts of a layer are stored in one tensor."""
        return any(name.endswith(".experts.gate_up_proj") for name in self._files)

    def shape(self, name: str) -> Shape:
        """Return the shape of one tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of one tensor; bfloat16 for one in 8 bits."""
        if name in self._scales:
            return torch.bfloat16
        return self.read(name, tuple(slice(0, 0) for _ in self.shape(name))).dtype

    def read(self, name: str, slices: Slices) -> Tensor:
        """Read a slice of one tensor, and nothing else of it; one in 8 bits is read as float32."""
        values = self._files[name].get_slice(name)[slices]
        scale = self._scales.get(name)
        if scale is None or self._block is None:
            return values
        scales = self._files[scale].get_slice(scale)[block_scales.blocks_of(slices, self._block)]
        return block_scales.dequantized(values, scales, slices, self._block)

    def whole(self, name: str) -> Tensor:
        """Read all of one tensor, in its `dtype`."""
        return self.read(name, tuple(slice(0, size) for size in self.shape(name))).to(self.dtype(name))
