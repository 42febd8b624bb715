"""Loads a Transformers checkpoint into a model sharded by FSDP2: each rank reads the rows that it holds.

A folder that cannot be read so (`folder_shards.py`) is loaded by Transformers on rank 0 and scattered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moe_replay.distributed.ranks import from_rank_0, raise_on_all_ranks
from moe_replay.rollout.model_folder import (
    ModelError,
    build_model,
    check_experts,
    check_finite,
    load_model,
    read_config,
)
from moe_replay.train.backends import lora
from moe_replay.train.backends.folder_shards import (
    FolderShards,
    can_compute_constants,
    compute_constants,
    without_scales,
)
from moe_replay.train.config.sections import ModelConfig

# Scoring and training must compute the same function of the weights.
_RANDOM_IN_TRAINING = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")


def sharded_model(folder: str, config: ModelConfig, device: torch.device, *, trained: bool) -> Any:
    """Return the model of a folder with float32 weights sharded over all ranks; trainable, or frozen for scoring."""
    whole, has_adapters = None, trained and bool(config.lora_rank)
    seed = int(from_rank_0(lambda: str(int(torch.randint(2**62, ()))), "drawing a seed")) if has_adapters else 0
    with raise_on_all_ranks("loading the model"):
        settings = read_config(folder, trust_remote_code=config.trust_remote_code)
        settings.update({name: 0.0 for name in _RANDOM_IN_TRAINING if getattr(settings, name, 0.0)})
        check_experts(folder)
        has_scales = without_scales(settings)
        model = _empty(settings, config)
        shards = FolderShards.of(folder, model) if can_compute_constants() else None
        if has_scales and shards is None:
            raise ModelError(
                f"weights in 8 bits cannot be read from {folder}",
                expected="safetensors files with the names and shapes of the model's checkpoint, and Transformers 5",
                remedy="Complete the folder, or convert it to bfloat16 first",
            )
        model = _prepared(model, config, trained)  # adapters that cannot be added fail here, at once
        if shards is not None and has_adapters:
            whole = lora.initialized(_prepared(_empty(settings, config), config, trained), seed)
        elif shards is None and dist.get_rank() == 0:
            whole = _prepared(_loaded(folder, settings, config), config, trained)
    if trained and config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    _shard(model, getattr(torch, config.dtype), device)
    model.to_empty(device=device)
    if shards is None:
        _fill(model, whole)
    else:
        with raise_on_all_ranks("reading the weights"):
            _read(model, shards, whole)
    with raise_on_all_ranks("checking the weights"):
        check_finite(((name, parameter.to_local()) for name, parameter in model.named_parameters()), folder)
    return model


@torch.no_grad()
def _read(model: Any, shards: FolderShards, adapters: nn.Module | None) -> None:
    """Fill the shards of this rank from the folder; adapters, which it does not have, from a model that holds them."""
    compute_constants(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        local, first = parameter.to_local(), row_offset(parameter)
        plain = lora.plain_name(name)
        if plain in shards:
            local.copy_(shards.rows(plain, tuple(parameter.shape), first, len(local)))
        else:
            assert adapters is not None, f"{name} is not in the folder"
            local.copy_(adapters.get_parameter(name)[first : first + len(local)])
    for name, buffer in model.named_buffers():
        if (plain := lora.plain_name(name)) in shards:
            buffer.copy_(shards.whole(plain))


def row_offset(tensor: DTensor) -> int:
    """Return the first row that this rank holds; rows are cut as `torch.chunk` does."""
    (placement,) = tensor.placements
    assert placement == Shard(0), f"sharded as {placement}"
    rows = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(rows * tensor.device_mesh.get_local_rank(), tensor.shape[0])


def _prepared(model: Any, config: ModelConfig, trained: bool) -> Any:
    if not trained:
        model.requires_grad_(False)
    elif config.lora_rank:
        lora.add_adapters(model, config)
    return model


def _loaded(folder: str, settings: Any, config: ModelConfig) -> Any:
    return load_model(
        folder,
        config=settings,
        trust_remote_code=config.trust_remote_code,
        dtype=torch.float32,
        attn_implementation=config.attention,
    )


def _empty(settings: Any, config: ModelConfig) -> Any:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return build_model(
            settings,
            trust_remote_code=config.trust_remote_code,
            dtype=torch.float32,
            attn_implementation=config.attention,
        )


@torch.no_grad()
def _fill(model: nn.Module, whole: nn.Module | None) -> None:
    """Give every rank its shards of the weights, and all buffers, of the model that rank 0 has loaded."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if whole is not None:
            full.copy_(whole.get_parameter(name))
        shard = distribute_tensor(full, parameter.device_mesh, parameter.placements)  # scattered by rank 0
        parameter.to_local().copy_(shard.to_local())
    for name, buffer in model.named_buffers():
        if whole is not None:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)


def _shard(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    kinds = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    if not layers:
        raise ModelError(
            "nothing says which modules are the model's layers",
            expected="_no_split_modules of the Transformers model",
            found=type(model).__name__,
        )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
