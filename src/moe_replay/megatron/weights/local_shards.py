"""The parameter shards of a Megatron-Core model on this rank, and on all others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_replay.distributed.ranks import all_gather_json
from moe_replay.megatron.weights.tensor_slices import ParameterShard, Shape
from moe_replay.replay.adapters.megatron import language_model

# Transformer Engine fuses a norm into the projection after it, and numbers the local experts in the parameter name.
_TRANSFORMER_ENGINE_NAMES = [
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$"), r"self_attention.\1_layernorm.weight"),
    (
        re.compile(r"mlp\.experts\.linear_(fc[12])\.(weight|bias)(\d+)$"),
        r"mlp.experts.local_experts.\3.linear_\1.\2",
    ),
]
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_GROUPED = re.compile(r"(?<=\.mlp\.experts\.)(weight|bias)([12])$")  # all experts of a rank in one parameter
ADAPTER = ".lora."  # in the names of parameters that no checkpoint of the model has
_EXPERT_BIAS = "router.expert_bias"  # a buffer that checkpoints hold as a weight


class ParameterSpec(NamedTuple):
    """Shape and sharding of one parameter of a pipeline stage, the same on all ranks of the stage."""

    key: str  # with {layer} and {expert} in place of their indices
    layer: int | None  # global decoder index
    expert: int | None  # local index on its expert-parallel rank
    shape: Shape  # of a shard
    dtype: torch.dtype
    partition_dim: int | None  # along which it is sharded, or None


class ParallelGroups(NamedTuple):
    """The process groups that a model is sharded over."""

    tensor: Any
    expert_tensor: Any
    expert: Any
    pipeline: Any

    @classmethod
    def of_this_process(cls) -> ParallelGroups:
        from megatron.core import parallel_state as ps

        return cls(
            ps.get_tensor_model_parallel_group(),
            ps.get_expert_tensor_parallel_group(),
            ps.get_expert_model_parallel_group(),
            ps.get_pipeline_model_parallel_group(),
        )


@dataclass(frozen=True)
class LocalModel:
    """The model chunks on this rank."""

    config: Any
    groups: ParallelGroups
    specs: tuple[tuple[ParameterSpec, ...], ...]  # parameters of each pipeline stage
    tensors: tuple[Tensor, ...]  # parameters on this rank, in the order of its stage's specs
    is_tied: bool

    @classmethod
    def of(cls, chunks: nn.Module | Sequence[nn.Module]) -> LocalModel:
        """Describe the parameters of all pipeline stages. Collective over all ranks of the model."""
        models = [language_model(chunk) for chunk in ([chunks] if isinstance(chunks, nn.Module) else chunks)]
        groups = ParallelGroups.of_this_process()
        named = [item for model in models for item in _named_tensors(model)]
        local = [ParameterSpec(*name, tuple(tensor.shape), tensor.dtype, dim) for name, tensor, dim in named]
        stages = all_gather_json(specs_to_json(local), groups.pipeline)
        return cls(
            models[0].config,
            groups,
            tuple(map(specs_from_json, stages)),
            tuple(tensor for _, tensor, _ in named),
            models[0].share_embeddings_and_output_weights,
        )

    @property
    def parameters(self) -> Iterator[tuple[ParameterSpec, Tensor]]:
        return zip(self.specs[self.groups.pipeline.rank()], self.tensors, strict=True)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def shard_groups(self, spec: ParameterSpec) -> tuple[Any, Any]:
        """Return the expert-parallel and the tensor-parallel group of a parameter; None where it is replicated."""
        by_expert = None if spec.expert is None else self.groups.expert
        if spec.partition_dim is None:
            return by_expert, None
        return by_expert, self.groups.tensor if spec.expert is None else self.groups.expert_tensor

    def num_shards(self, spec: ParameterSpec) -> tuple[int, int]:
        """Return the sizes of the two `shard_groups`, 1 for None."""
        by_expert, by_shard = (1 if group is None else group.size() for group in self.shard_groups(spec))
        return by_expert, by_shard

    def shard(self, spec: ParameterSpec, expert_rank: int, rank: int) -> ParameterShard:
        """Return the shard of a parameter on the rank with these coordinates in its `shard_groups`."""
        expert = spec.expert
        if expert is not None:
            expert += expert_rank * self.config.num_moe_experts // self.groups.expert.size()
        _, size = self.num_shards(spec)
        return ParameterShard(spec.key, spec.shape, spec.partition_dim, spec.layer, expert, self.config, rank, size)

    def local_shard(self, spec: ParameterSpec) -> ParameterShard:
        expert_rank, rank = (0 if group is None else group.rank() for group in self.shard_groups(spec))
        return self.shard(spec, expert_rank, rank)

    def unsharded(self) -> Iterator[ParameterShard]:
        """Yield every parameter of the whole model unsharded, for all experts."""
        for specs in self.specs:
            for spec in specs:
                for expert_rank in range(self.num_shards(spec)[0]):
                    yield self.shard(spec, expert_rank, 0).unsharded()


def global_name(name: str, layer_numbers: Sequence[int]) -> tuple[str, int | None, int | None]:
    """Return the key of a parameter, its global layer index and its local expert index.

    layer_numbers   Megatron-Core's, counted from 1, of the layers on this rank
    """
    for pattern, plain in _TRANSFORMER_ENGINE_NAMES:
        name = pattern.sub(plain, name)
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    key = _EXPERT.sub("{expert}", _LAYER.sub("{layer}", name))
    return key, layer and layer_numbers[int(layer[0])] - 1, expert and int(expert[0])


def specs_to_json(specs: Sequence[ParameterSpec]) -> list[list[Any]]:
    return [[*spec[:4], str(spec.dtype).removeprefix("torch."), spec.partition_dim] for spec in specs]


def specs_from_json(specs: Sequence[Sequence[Any]]) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(key, layer, expert, tuple(shape), getattr(torch, dtype), partition_dim)
        for key, layer, expert, shape, dtype, partition_dim in specs
    )


_Named = tuple[tuple[str, int | None, int | None], Tensor, int | None]
"""The result of `global_name`, the tensor, and the dimension along which it is sharded."""


def _named_tensors(model: Any) -> Iterator[_Named]:
    numbers = [layer.layer_number for layer in model.decoder.layers]
    for name, parameter in model.named_parameters():
        if ADAPTER in name:
            continue
        if _GROUPED.search(name):
            for expert_name, tensor, partition_dim in expert_views(name, parameter, model.config):
                yield global_name(expert_name, numbers), tensor, partition_dim
        else:
            owner = model.get_submodule(name.rpartition(".")[0])
            yield global_name(name, numbers), parameter, _partition_dim(parameter, owner)
    for name, buffer in model.named_buffers():
        if name.endswith(_EXPERT_BIAS) and buffer is not None:
            yield global_name(name, numbers), buffer, None


def expert_views(name: str, parameter: Tensor, config: Any) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield name, view and partition dimension per expert of a parameter that holds all experts of this rank.

    The names and shapes are those of `SequentialMLP`. `GroupedExperts` stores (experts, out, in), Megatron-Core's
    `GroupedMLP` (in, experts * out) and (experts * in, out), each to be read as (experts, in, out).
    """
    whole, partition_dim = parameter.detach(), _partition_dim(parameter)
    if whole.dim() == 2 and ".weight" in name:
        experts = config.num_moe_experts // config.expert_model_parallel_size
        shape = (config.hidden_size, -1) if name.endswith("1") else (-1, config.hidden_size)
        whole = whole.view(experts, *shape).transpose(1, 2)
        partition_dim = 1 if name.endswith("1") else 2
    for expert, view in enumerate(whole):
        expert_name = _GROUPED.sub(rf"local_experts.{expert}.linear_fc\2.\1", name)
        yield expert_name, view, None if partition_dim is None else partition_dim - 1


def _partition_dim(tensor: Tensor, owner: nn.Module | None = None) -> int | None:
    classes = [kind.__name__ for kind in type(owner).__mro__ if kind.__name__.startswith("TE")]
    if classes and getattr(owner, "parallel_mode", "") is None:
        # Megatron-Core communicates itself around this layer (experts, replicated projections). Transformer Engine does
        # not know how it is sharded, and marks every weight as sharded along dimension 0.
        if any("RowParallel" in name for name in classes):
            return 1 if tensor.dim() == 2 else None
        return 0 if any("ColumnParallel" in name for name in classes) else None
    is_sharded = getattr(tensor, "tensor_model_parallel", False)  # an attribute that Megatron-Core sets
    return tensor.partition_dim if is_sharded else None  # type: ignore[attr-defined]


# ---- gather ---------------------------------------------------------------------------------------------------------


def export_order(local: LocalModel) -> list[tuple[int, ParameterSpec]]:
    """Return every parameter with its pipeline stage: embeddings, layers in order, then the rest."""

    def position(item: tuple[int, ParameterSpec]) -> float:
        _, spec = item
        if spec.layer is not None:
            return spec.layer
        return -1 if spec.key.startswith("embedding.") else float("inf")

    return sorted(((stage, spec) for stage, specs in enumerate(local.specs) for spec in specs), key=position)


def gather(local: LocalModel, spec: ParameterSpec, stage: int, shard: Tensor | None) -> Tensor:
    """Return all shards of a parameter on every rank, (expert-parallel ranks, tensor-parallel ranks, *shard).

    Collective.
    """
    pipeline = local.groups.pipeline
    if shard is None:
        shards = torch.empty((*local.num_shards(spec), *spec.shape), dtype=spec.dtype, device=local.device)
    else:
        by_expert, by_shard = local.shard_groups(spec)
        shards = _all_gather(_all_gather(shard.detach(), by_shard), by_expert)
    if pipeline.size() > 1:
        dist.broadcast(shards, dist.get_global_rank(pipeline, stage), group=pipeline)
    return shards


def _all_gather(tensor: Tensor, group: Any) -> Tensor:
    """Return the tensors of all ranks of a group, (ranks, *shape)."""
    if group is None or group.size() == 1:
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)
