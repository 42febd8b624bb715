"""Loads a Transformers checkpoint into a model sharded by FSDP2: only rank 0 ever holds the full model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from moe_replay.distributed.ranks import raise_on_all_ranks
from moe_replay.rollout.model_folder import ModelError, build_model, check_finite, load_model, read_config
from moe_replay.train.backends import lora
from moe_replay.train.config.sections import ModelConfig

# Scoring and training must compute the same function of the weights.
_RANDOM_IN_TRAINING = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise")


def sharded_model(folder: str, config: ModelConfig, device: torch.device, *, trained: bool) -> Any:
    """Return the model of a folder with float32 weights sharded over all ranks; trainable, or frozen for scoring."""
    with raise_on_all_ranks("loading the model"):
        settings = read_config(folder, trust_remote_code=config.trust_remote_code)
        settings.update({name: 0.0 for name in _RANDOM_IN_TRAINING if getattr(settings, name, 0.0)})
        model = _prepared(_empty(settings, config), config, trained)  # adapters that cannot be added fail here, at once
        whole = _prepared(_loaded(folder, settings, config), config, trained) if dist.get_rank() == 0 else None
    if trained and config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    _shard(model, getattr(torch, config.dtype), device)
    model.to_empty(device=device)
    _fill(model, whole)
    with raise_on_all_ranks("checking the weights"):
        check_finite(((name, parameter.to_local()) for name, parameter in model.named_parameters()), folder)
    return model


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
