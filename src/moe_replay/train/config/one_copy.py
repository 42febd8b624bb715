"""The frozen weights of a run: whether trainer and engine have one copy, and who may have them in 8 bits."""

from __future__ import annotations

from moe_replay.engines.base import devices_per_engine
from moe_replay.errors import LayoutError
from moe_replay.train.config.sections import Sections

_SIZES = ("kv_cache_memory_bytes", "gpu_memory_utilization")


def has_one_copy(config: Sections, ranks: int, device: str) -> bool:
    """Return whether the trainer computes with the engine's frozen weights."""
    return config.rollout.lora and two_copies_because(config, ranks, device) is None


def two_copies_because(config: Sections, ranks: int, device: str) -> str | None:
    """Return why the engine and the trainer each have the frozen weights; None: the trainer computes with the engine's.

    Only of runs that send the adapter alone (`rollout.lora`).

    ranks    of the trainer
    device   type of their devices
    """
    rollout, options = config.rollout, config.rollout.options
    if not rollout.share_weights:
        return "rollout.share_weights = false"
    if rollout.engine != "vllm" or config.starts_servers:
        return "the engine is not vLLM in the process of the trainer"
    if config.backend.kind != "fsdp":
        return "the backend is Megatron-Core, which lays weights out in its own way"
    if config.model.base_dtype is not None:
        return f"model.base_dtype = {config.model.base_dtype!r}: the trainer's are in 8 bits"
    if ranks != 1:
        return f"{ranks} ranks of the trainer shard them"
    if devices_per_engine(options) != 1:
        return f"the engine shards them over {devices_per_engine(options)} devices"
    if device != "cpu" and not {*_SIZES} & options.keys():
        return "vLLM would start first and take the whole device; set rollout.options.kv_cache_memory_bytes to have one"
    return None


def check_alone(base_dtype: str, ranks: int) -> None:
    """Raise unless there is one rank: FSDP2 does not shard weights in 8 bits."""
    if ranks > 1:
        raise LayoutError(
            f"model.base_dtype = {base_dtype!r} is for one rank",
            expected="one rank of the trainer",
            found=f"{ranks}, which shard the frozen weights in model.dtype",
            remedy="Remove model.base_dtype, or train on one GPU",
        )
