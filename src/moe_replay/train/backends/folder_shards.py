"""Reads a model folder into the shards of this rank: only the rows that it holds, of one parameter at a time.

What it cannot read (a folder with other names than the model's checkpoint, files that are not safetensors, buffers that
only a loaded model has) is left to Transformers, which also says what is missing or misshapen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.megatron.weights.block_scales import KEY
from moe_replay.megatron.weights.checkpoint import INDEX, Checkpoint
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.rollout.model_folder import check_unexpected
from moe_replay.rollout.weights.checkpoint import CheckpointForm, model_tensor

Shape = tuple[int, ...]
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


class FolderShards:
    """The tensors of a folder in the form of a Transformers model.

    model   on any device, `meta` too
    parts   tensors of the checkpoint that make up each tensor of the model, with their shapes
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, parts: dict[str, dict[str, Shape]]) -> None:
        self._checkpoint, self._model, self._parts = checkpoint, model, parts

    @classmethod
    def of(cls, folder: str, model: Any) -> FolderShards | None:
        """Return what reads a folder for a model on the `meta` device; None if Transformers has to load it."""
        path = Path(folder)
        if not (path / INDEX).is_file() and not (path / "model.safetensors").is_file():
            return None
        if any(not _is_rotary(module) for module in _with_constants(model)):
            return None
        try:
            checkpoint = Checkpoint(path)
            present = checkpoint.names
        except WeightMapError:
            if _has_scales(_config_file(path)):
                raise
            return None
        tied, form = _tied(model), CheckpointForm(model)
        parts = {
            name: {part: tuple(one.shape) for part, one in form.tensors(name, tensor).items()}
            for name, tensor in model.state_dict().items()
            if name not in tied
        }
        wanted = {part: shape for of_tensor in parts.values() for part, shape in of_tensor.items()}
        if any(part not in present or checkpoint.shape(part) != shape for part, shape in wanted.items()):
            return None
        check_unexpected(model, present - wanted.keys() - tied, folder)
        return cls(checkpoint, model, parts)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def rows(self, name: str, shape: Shape, first: int, count: int) -> Tensor:
        """Return some rows of a tensor of the model; nothing else is read where that is possible."""
        parts = self._parts[name]
        if list(parts) == [name]:
            return self._checkpoint.read(name, (slice(first, first + count), *(slice(0, size) for size in shape[1:])))
        experts = {int(found[0]) for part in parts if (found := _EXPERT.search(part))}
        if experts == set(range(shape[0])) and all(map(_EXPERT.search, parts)) and count:
            rows = self._converted(name, range(first, first + count))
            if tuple(rows.shape) == (count, *shape[1:]):
                return rows
        return self._converted(name)[first : first + count]

    def whole(self, name: str) -> Tensor:
        """Return a tensor of the model."""
        return self._converted(name)

    def _converted(self, name: str, experts: range | None = None) -> Tensor:
        """Return a tensor of the model, or the part of it that holds some experts."""
        chosen = {}
        for part, shape in self._parts[name].items():
            number = _EXPERT.search(part)
            if experts is None or (number is not None and int(number[0]) in experts):
                chosen[part] = self._checkpoint.read(part, tuple(slice(0, size) for size in shape))
        return model_tensor(self._model, name, chosen)


def _config_file(folder: Path) -> Any:
    """Return config.json of a folder as it is; None if it cannot be read."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _has_scales(config: Any) -> bool:
    settings = config.get(KEY) if isinstance(config, dict) else None
    return isinstance(settings, dict) and settings.get("quant_method") == "fp8"


def without_scales(settings: Any) -> bool:
    """Remove from a Transformers config that weights are in 8 bits: they are read as float32. Return whether it did."""
    if not _has_scales({KEY: getattr(settings, KEY, None)}):
        return False
    del settings.quantization_config
    return True


def _tied(model: nn.Module) -> set[str]:
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in model.named_parameters()}


# ---- what no checkpoint has ------------------------------------------------------------------------------------------


def _with_constants(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if module._non_persistent_buffers_set)


def _is_rotary(module: nn.Module) -> bool:
    """Whether Transformers can compute the constants of a module anew."""
    has_no_parameters = next(module.parameters(), None) is None
    return "RotaryEmbedding" in type(module).__name__ and hasattr(module, "original_inv_freq") and has_no_parameters


@torch.no_grad()
def compute_constants(model: Any) -> None:
    """Compute the buffers that a checkpoint does not hold, as Transformers does for a model that it loads."""
    for module in _with_constants(model):
        for name in module._non_persistent_buffers_set:
            getattr(module, name).fill_(torch.nan)
        model._init_weights(module)
        for name in module._non_persistent_buffers_set:
            assert torch.isfinite(getattr(module, name)).all(), f"{name} of {type(module).__name__} was not computed"


def can_compute_constants() -> bool:
    """Whether this version of Transformers has a way to compute such buffers."""
    return find_spec("transformers.core_model_loading") is not None
