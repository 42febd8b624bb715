"""Transformers checkpoints in and out of Megatron-Core models, whatever parallelism they are built for.

    recipe = megatron_config(folder, tensor_model_parallel_size=2, expert_model_parallel_size=4)
    chunks = recipe.build()                         # of this rank
    load_hf(folder, chunks)                         # each rank reads its own shards
    for name, tensor in hf_tensors(chunks, folder): # the way back, one tensor at a time, e.g. to a rollout engine
        ...
    export_hf(chunks, "out", like=folder)           # or as a folder that Transformers and vLLM load

One file a family, by `model_type`; docs/megatron-weights.md says what each can do and how to add one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_replay.megatron.weights import transfer
from moe_replay.megatron.weights.checkpoint import FILE_BYTES, Checkpoint
from moe_replay.megatron.weights.deepseek_v3 import DEEPSEEK_V3
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.family import ADD_A_FAMILY, Family
from moe_replay.megatron.weights.mixtral import MIXTRAL
from moe_replay.megatron.weights.model import MegatronRecipe, read_config, recipe
from moe_replay.megatron.weights.olmoe import OLMOE
from moe_replay.megatron.weights.qwen3_moe import QWEN3_MOE
from moe_replay.megatron.weights.transfer import Chunks

__all__ = [
    "WEIGHT_MAPS",
    "Family",
    "MegatronRecipe",
    "WeightMapError",
    "export_hf",
    "family_of",
    "hf_tensors",
    "load_hf",
    "megatron_config",
]

WEIGHT_MAPS: Mapping[str, Family] = {family.model_type: family for family in (DEEPSEEK_V3, MIXTRAL, OLMOE, QWEN3_MOE)}


def family_of(model_type: str) -> Family:
    """The family of this `model_type`."""
    if model_type not in WEIGHT_MAPS:
        raise WeightMapError(
            "no weight map for this model type",
            expected=f"one of {', '.join(WEIGHT_MAPS)}",
            found=repr(model_type),
            remedy=ADD_A_FAMILY,
        )
    return WEIGHT_MAPS[model_type]


def megatron_config(hf_config: Any, **settings: Any) -> MegatronRecipe:
    """How to build a Megatron-Core model of a Transformers config, or of the one in a folder.

    `settings` are those of a `TransformerConfig`: parallel sizes, dtypes, recomputation. Routing replay is on. Without
    CUDA the model is made for the CPU (`moe_replay.megatron.cpu`).
    """
    hf = read_config(hf_config)
    return recipe(hf, family_of(hf.model_type), settings)


def load_hf(folder: str | Path, chunks: Chunks) -> None:
    """Read a checkpoint into the pipeline chunks of this rank, wrapped or not; all ranks call it.

    An optimizer that keeps a copy of the weights must read them again: `optimizer.reload_model_params()`.
    """
    checkpoint = Checkpoint(folder)
    transfer.load(checkpoint, chunks, family_of(checkpoint.model_type))


def hf_tensors(chunks: Chunks, like: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The weights in the names, shapes and dtypes of the checkpoint `like`, one at a time, on every rank.

    All ranks must take all of them, also those that do nothing with them.
    """
    checkpoint = Checkpoint(like)
    return transfer.export_tensors(chunks, checkpoint, family_of(checkpoint.model_type))


def export_hf(chunks: Chunks, folder: str | Path, like: str | Path, file_bytes: int = FILE_BYTES) -> None:
    """Write the weights as a folder like the checkpoint `like`, whose config and tokenizer are copied."""
    checkpoint = Checkpoint(like)
    transfer.write(chunks, folder, checkpoint, family_of(checkpoint.model_type), file_bytes)
