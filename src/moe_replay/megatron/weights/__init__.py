"""Transformers checkpoints in and out of Megatron-Core models, for any parallel layout.

    recipe = megatron_config(folder, tensor_model_parallel_size=2, expert_model_parallel_size=4)
    chunks = recipe.build()                         # the model chunks of this rank
    load_hf(folder, chunks)                         # each rank reads its own shards
    for name, tensor in hf_tensors(chunks, folder): # export, one tensor at a time, e.g. to a rollout engine
        ...
    export_hf(chunks, "out", like=folder)           # or as a folder that Transformers and vLLM load

A family is a `Family` and one line in `WEIGHT_MAPS`, or one passed by the caller as `family`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_replay.distributed.ranks import world_size
from moe_replay.megatron.weights import loading as transfer
from moe_replay.megatron.weights.checkpoint import FILE_BYTES, Checkpoint, write_folder
from moe_replay.megatron.weights.family import ADD_A_FAMILY, Family
from moe_replay.megatron.weights.loading import Chunks, Merging
from moe_replay.megatron.weights.local_shards import ParameterSpec
from moe_replay.megatron.weights.model import MegatronRecipe, recipe
from moe_replay.megatron.weights.source import MegatronSource, extra_tensors
from moe_replay.megatron.weights.tensor_slices import WeightMapError
from moe_replay.routes.topology import text_config
from moe_replay.utils.plugins import is_path, resolve
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.source import tensors_of

__all__ = [
    "NOT_MAPPED",
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
    "glm4_moe": "moe_replay.megatron.weights.families:GLM4_MOE",
    "gpt_oss": "moe_replay.megatron.weights.gpt_oss:GPT_OSS",
    "kimi_k2": "moe_replay.megatron.weights.deepseek_v3:DEEPSEEK_V3",
    "minimax_m2": "moe_replay.megatron.weights.families:MINIMAX_M2",
    "mixtral": "moe_replay.megatron.weights.families:MIXTRAL",
    "olmoe": "moe_replay.megatron.weights.families:OLMOE",
    "qwen2_moe": "moe_replay.megatron.weights.families:QWEN2_MOE",
    "qwen3_5_moe": "moe_replay.megatron.weights.qwen3_5_moe:QWEN3_5_MOE",
    "qwen3_5_moe_text": "moe_replay.megatron.weights.qwen3_5_moe:QWEN3_5_MOE_TEXT",
    "qwen3_moe": "moe_replay.megatron.weights.families:QWEN3_MOE",
    "qwen3_next": "moe_replay.megatron.weights.qwen3_next:QWEN3_NEXT",
}
"""`model_type` of a Transformers config -> its family, or where to import it from."""

_INDEXER = (
    "an indexer selects the tokens that its attention reads, and this selection is not replayed: attention of trainer "
    "and rollout would differ as routes do without replay"
)
NOT_MAPPED: Mapping[str, str] = {"deepseek_v32": _INDEXER, "glm_moe_dsa": _INDEXER}
"""`model_type` -> why it is refused (DeepSeek-V3.2, GLM-5)."""


def family_of(model_type: str, family: Family | str | None = None) -> Family:
    """Return the family of a `model_type`, or the one passed: a `Family`, a built-in name or 'module:name'."""
    if isinstance(family, Family):
        return family
    name = family or model_type
    if name in NOT_MAPPED:
        raise WeightMapError(
            f"{name} is not trained on Megatron-Core: {NOT_MAPPED[name]}",
            expected=f"one of {', '.join(WEIGHT_MAPS)}",
            found=repr(name),
            remedy='backend.kind = "fsdp" runs the model as Transformers does, with the indexer\'s own selection',
        )
    if name not in WEIGHT_MAPS and not is_path(name):
        raise WeightMapError(
            "no weight map for this model type",
            expected=f"one of {', '.join(WEIGHT_MAPS)}, or family='module:name'",
            found=repr(name),
            remedy=ADD_A_FAMILY,
        )
    resolved = resolve(name, WEIGHT_MAPS, kind="weight family", key="family")
    if not isinstance(resolved, Family):
        raise WeightMapError(f"{name} is not a weight family", expected="a Family", found=type(resolved).__name__)
    return resolved


def megatron_config(
    hf_config: Any,
    *,
    family: Family | str | None = None,
    trust_remote_code: bool = False,
    transformer_engine: bool = True,
    **settings: Any,
) -> MegatronRecipe:
    """Return the recipe for a Megatron-Core model of a Transformers config, or of a folder's config.

    family              None: by the config's `model_type`
    trust_remote_code   run a config class that comes with the model
    transformer_engine  use its layers where it is installed
    settings            of a `TransformerConfig`: parallel sizes, dtypes, recomputation

    Routing replay is on. Without CUDA the model is built for the CPU (`moe_replay.megatron.cpu`).
    """
    is_folder = isinstance(hf_config, str | Path)
    hf = read_config(hf_config, trust_remote_code=trust_remote_code) if is_folder else hf_config
    chosen = family_of(hf.model_type, family)
    return recipe(text_config(hf), chosen, settings, transformer_engine=transformer_engine)


def load_hf(folder: str | Path, chunks: Chunks, *, family: Family | str | None = None) -> None:
    """Load a checkpoint into the model chunks of this rank, wrapped or not. Collective.

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

    Collective: all ranks must iterate to the end, whether they use the tensors or not. This rank's `adapters`
    (`moe_replay.megatron.lora`) are merged.
    """
    checkpoint = Checkpoint(like)
    weight_source = MegatronSource(chunks, checkpoint, family_of(checkpoint.model_type, family), adapters)
    return tensors_of(weight_source, range(world_size()))


def export_hf(
    chunks: Chunks,
    folder: str | Path,
    like: str | Path,
    file_bytes: int = FILE_BYTES,
    *,
    family: Family | str | None = None,
) -> None:
    """Write the weights as a checkpoint folder, each rank some of its files. Collective.

    Config, tokenizer and tensors that are not part of the model (multi-token prediction) are copied from `like`.
    """
    checkpoint = Checkpoint(like)
    chosen = family_of(checkpoint.model_type, family)
    extra = extra_tensors(checkpoint, chosen)
    write_folder(MegatronSource(chunks, checkpoint, chosen), folder, checkpoint.folder, file_bytes, extra=extra)
