"""LoRA adapters as peft and vLLM read them: tensors under PEFT's names, and a folder of them.

An adapter of rank r has two matrices for each weight that it changes: `lora_A` (r, in) and `lora_B` (out, r). Names are
those of the model's checkpoint, so that each expert has its own tensors, however the trainer keeps its experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_replay.utils.files import Write, apply_umask

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_SUFFIX = re.compile(r"(\.base_layer)*\.lora_[AB]\.weight$")
_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of a policy, which is all that an engine with the base model needs of an update.

    tensors      under PEFT's names, in any order, to be read once; reading them may be a collective operation
    rank, alpha  the adapter adds alpha / rank times the product of its two matrices
    parameters   full names of tensors with all experts of a layer, where the checkpoint keeps them in one
    """

    tensors: Iterable[tuple[str, Tensor]]
    rank: int
    alpha: float
    parameters: tuple[str, ...] = ()

    def config(self, names: Iterable[str], base: str = "") -> dict[str, Any]:
        """Return the content of `adapter_config.json` for tensors of these names."""
        modules = {_SUFFIX.sub("", name.removeprefix(PREFIX)) for name in names}
        modules -= {name.rpartition(".")[0] for name in self.parameters}
        experts = {_leaf(name) for name in modules if _OF_EXPERT.search(name)}
        # peft takes the names of expert projections for those of experts alone, not of dense layers too
        dense = {name for name in modules if _leaf(name) in experts and not _OF_EXPERT.search(name)}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": sorted({_leaf(name) for name in modules - dense}),
            "target_parameters": sorted([*(f"{name}.weight" for name in dense), *self.parameters]) or None,
        }


def module_names(parameter: str) -> tuple[str, str]:
    """Return PEFT's names of the two matrices for a weight of the checkpoint."""
    module = PREFIX + parameter.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def write_adapter(adapter: Adapter, folder: Path, base: str = "") -> None:
    """Write a PEFT folder."""
    folder.mkdir(parents=True, exist_ok=True)
    stage_adapter(adapter, base)(folder)


def stage_adapter(adapter: Adapter, base: str = "", *, here: bool = True) -> Write:
    """Copy an adapter to host memory and return what writes it as a PEFT folder; where `here` is false: nothing."""
    if not here:
        for _ in adapter.tensors:
            pass
        return lambda folder: []
    # Copies: a safetensors file cannot hold tensors that share memory.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in adapter.tensors}
    return lambda folder: _write(folder, tensors, adapter.config(tensors, base))


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> list[Path]:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    apply_umask(folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return [folder / TENSORS, folder / CONFIG]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
