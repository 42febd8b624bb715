"""Transformers checkpoints in and out of Megatron-Core models, for any parallel layout.

    recipe = megatron_config(folder, tensor_model_parallel_size=2, expert_model_parallel_size=4)
    chunks = recipe.build()                         # the model chunks of this rank
    load_hf(folder, chunks)                         # each rank reads its own shards
    for name, tensor in hf_tensors(chunks, folder): # export, one tensor at a time, e.g. to a rollout engine
        ...
    export_hf(chunks, "out", like=folder)           # or as a folder that Transformers and vLLM load

A family is one file and one line in `WEIGHT_MAPS`, or a `Family` of the caller's own, passed as `family`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_replay.distributed.ranks import world_size
from moe_replay.megatron.weights import source, transfer
from moe_replay.megatron.weights.checkpoint import FILE_BYTES, Checkpoint
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.family import ADD_A_FAMILY, Family
from moe_replay.megatron.weights.local_shards import ParameterSpec
from moe_replay.megatron.weights.model import MegatronRecipe, config_of, recipe
from moe_replay.megatron.weights.source import MegatronSource
from moe_replay.megatron.weights.transfer import Chunks, Merging
from moe_replay.rollout.weights.source import tensors_of
from moe_replay.utils.plugins import is_path, resolve

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

WEIGHT_MAPS: Mapping[str, Family | str] = {
    "deepseek_v3": "moe_replay.megatron.weights.deepseek_v3:DEEPSEEK_V3",
    "glm4_moe": "moe_replay.megatron.weights.glm4_moe:GLM4_MOE",
    "gpt_oss": "moe_replay.megatron.weights.gpt_oss:GPT_OSS",
    "mixtral": "moe_replay.megatron.weights.mixtral:MIXTRAL",
    "olmoe": "moe_replay.megatron.weights.olmoe:OLMOE",
    "qwen2_moe": "moe_replay.megatron.weights.qwen2_moe:QWEN2_MOE",
    "qwen3_moe": "moe_replay.megatron.weights.qwen3_moe:QWEN3_MOE",
    "qwen3_next": "moe_replay.megatron.weights.qwen3_next:QWEN3_NEXT",
}
"""`model_type` of a Transformers config -> its family, or where to import it from."""


def family_of(model_type: str, family: Family | str | None = None) -> Family:
    """Return the family of a `model_type`, or the given one: a `Family`, a built-in name or 'module:name'."""
    if isinstance(family, Family):
        return family
    name = family or model_type
    if name not in WEIGHT_MAPS and not is_path(name):
        raise WeightMapError(
            "no weight map for this model type",
            expected=f"one of {', '.join(WEIGHT_MAPS)}, or family='module:name'",
            found=repr(name),
            remedy=ADD_A_FAMILY,
        )
    found = resolve(name, WEIGHT_MAPS, kind="weight family", key="family")
    if not isinstance(found, Family):
        raise WeightMapError(f"{name} is not a weight family", expected="a Family", found=type(found).__name__)
    return found


def megatron_config(
    hf_config: Any, *, family: Family | str | None = None, trust_remote_code: bool = False, **settings: Any
) -> MegatronRecipe:
    """Return how to build a Megatron-Core model of a Transformers config, or of the one in a folder.

    family              None: the one of the config's `model_type`
    trust_remote_code   run a config class that comes with the model
    settings            of a `TransformerConfig`: parallel sizes, dtypes, recomputation

    Routing replay is on. Without CUDA the model is built for the CPU (`moe_replay.megatron.cpu`).
    """
    hf = config_of(hf_config, trust_remote_code=trust_remote_code)
    return recipe(hf, family_of(hf.model_type, family), settings)


def load_hf(folder: str | Path, chunks: Chunks, *, family: Family | str | None = None) -> None:
    """Load a checkpoint into the model chunks of this rank, wrapped or not. A collective call.

    An optimizer with master weights must copy them afterwards: `optimizer.reload_model_params()`.
    """
    checkpoint = Checkpoint(folder)
    transfer.load(checkpoint, chunks, family_of(checkpoint.model_type, family))


def hf_tensors(
    chunks: Chunks,
    like: str | Path,
    *,
    family: Family | str | None = None,
    adapters: Mapping[ParameterSpec, Merging] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with the names, shapes and dtypes of the checkpoint `like`, one at a time, on every rank.

    A collective: all ranks must iterate to the end, whether they use the tensors or not. `adapters` of this rank
    (`moe_replay.megatron.lora`) are merged.
    """
    checkpoint = Checkpoint(like)
    everything = MegatronSource(chunks, checkpoint, family_of(checkpoint.model_type, family), adapters)
    return tensors_of(everything, range(world_size()))


def export_hf(
    chunks: Chunks,
    folder: str | Path,
    like: str | Path,
    file_bytes: int = FILE_BYTES,
    *,
    family: Family | str | None = None,
) -> None:
    """Write the weights as a checkpoint folder; config and tokenizer are copied from `like`. A collective call."""
    checkpoint = Checkpoint(like)
    source.write(chunks, folder, checkpoint, family_of(checkpoint.model_type, family), file_bytes)
