"""Weights in and out: a checkpoint folder into the chunks of this rank, and the chunks of all ranks into a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_replay.megatron.weights.checkpoint import FILE_BYTES, Checkpoint, write_folder
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.family import ADD_A_FAMILY, Family, Rules
from moe_replay.megatron.weights.local_shards import LocalModel, ParameterSpec
from moe_replay.megatron.weights.tensor_slices import ParameterShard, TensorSlice

Chunks = nn.Module | Sequence[nn.Module]


class WeightMap(NamedTuple):
    """One family's rules, for the form that one checkpoint and one model have."""

    family: Family
    rules: Rules

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        """What a shard is made of."""
        rule = self.rules.get(shard.key)
        if rule is None:
            raise WeightMapError(
                f"the family {self.family.model_type} has no rule for the parameter {shard.key}",
                layer=shard.layer,
                found=f"shape {shard.whole}",
                remedy=f"Build the model with megatron_config(); {ADD_A_FAMILY}",
            )
        return rule.slices(shard)


# ---- in -------------------------------------------------------------------------------------------------------------


def load(checkpoint: Checkpoint, chunks: Chunks, family: Family) -> None:
    """Copy a checkpoint into the parameters of this rank, in place and in their dtype. All ranks call it.

    Whether everything fits is known before the first weight is written, and alike on all ranks.
    """
    local = LocalModel.of(chunks)
    weight_map = WeightMap(family, family.rules_for(fused=checkpoint.is_fused, tied=local.is_tied))
    _check(checkpoint, local, weight_map)
    with torch.no_grad():
        for spec, tensor in local.own:
            for part in weight_map.slices(local.own_shard(spec)):
                target = tensor[part.target]
                target.copy_(checkpoint.read(part.name, part.source).reshape(target.shape))


def _check(checkpoint: Checkpoint, local: LocalModel, weight_map: WeightMap) -> None:
    """Every tensor that the whole model needs is there, has its shape, and there is no other."""
    present = checkpoint.names
    model_type = weight_map.family.model_type
    expected = {part.name: (part.whole, shard) for shard in local.whole() for part in weight_map.slices(shard)}
    aside = weight_map.family.set_aside(checkpoint.config)
    unexpected = sorted(name for name in present - expected.keys() if aside is None or not aside.match(name))
    missing = sorted(expected.keys() - present)
    if missing:
        raise WeightMapError(
            f"{len(missing)} tensors are missing in the checkpoint ({model_type}), the first is {missing[0]}",
            layer=expected[missing[0]][1].layer,
            expected=f"shape {expected[missing[0]][0]} for {expected[missing[0]][1].key}",
            found=f"{len(present)} other tensors in {checkpoint.folder}",
        )
    if unexpected:
        raise WeightMapError(
            f"{len(unexpected)} tensors of the checkpoint ({model_type}) have no place in the model, "
            f"the first is {unexpected[0]}",
            expected=f"{len(expected)} tensors",
            found=f"{unexpected[0]} of shape {checkpoint.shape(unexpected[0])}",
            remedy="The model must be built from this checkpoint's config",
        )
    for name, (shape, shard) in expected.items():
        if checkpoint.shape(name) != shape:
            raise WeightMapError(
                f"the tensor {name} ({model_type}) has not the shape that {shard.key} needs",
                layer=shard.layer,
                expected=f"shape {shape}",
                found=f"shape {checkpoint.shape(name)}",
                remedy="The model must be built from this checkpoint's config",
            )


# ---- out ------------------------------------------------------------------------------------------------------------


def export_tensors(chunks: Chunks, like: Checkpoint, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, whole and in its dtype, layer by layer, on every rank.

    All ranks must take all of them: each is gathered from the ranks that hold it when it is asked for.
    """
    local = LocalModel.of(chunks)
    weight_map = WeightMap(family, family.rules_for(fused=like.is_fused, tied=local.is_tied))
    _check(like, local, weight_map)
    own = dict(local.own)
    assembly = _Assembly(like)
    for stage, spec in _in_order(local):
        shards = _gathered(local, spec, stage, own.get(spec))
        for expert_rank, of_experts in enumerate(shards):
            for rank, shard in enumerate(of_experts):
                for part in weight_map.slices(local.shard(spec, expert_rank, rank)):
                    yield from assembly.add(part, shard)
    assembly.check_complete()


def write(chunks: Chunks, folder: str | Path, like: Checkpoint, family: Family, file_bytes: int = FILE_BYTES) -> None:
    """The checkpoint folder of the model as it is now, written by the first rank. All ranks call it."""
    write_folder(export_tensors(chunks, like, family), folder, like.folder, file_bytes)
    dist.barrier()  # nobody reads before it is written


def _in_order(local: LocalModel) -> list[tuple[int, ParameterSpec]]:
    """Every parameter with the pipeline stage that holds it: embeddings, layers, what comes after."""

    def place(item: tuple[int, ParameterSpec]) -> float:
        _, spec = item
        if spec.layer is not None:
            return spec.layer
        return -1 if spec.key.startswith("embedding.") else float("inf")

    return sorted(((stage, spec) for stage, specs in enumerate(local.specs) for spec in specs), key=place)


def _gathered(local: LocalModel, spec: ParameterSpec, stage: int, own: Tensor | None) -> Tensor:
    """(expert ranks, shard ranks, *shard): all there is of one parameter, on every rank."""
    pipeline = local.groups.pipeline
    if own is None:
        everywhere = torch.empty((*local.spread_sizes(spec), *spec.shape), dtype=spec.dtype, device=local.device)
    else:
        by_expert, by_shard = local.spread(spec)
        everywhere = _from_all(_from_all(own.detach(), by_shard), by_expert)
    if pipeline.size() > 1:
        dist.broadcast(everywhere, dist.get_global_rank(pipeline, stage), group=pipeline)
    return everywhere


def _from_all(tensor: Tensor, group: Any) -> Tensor:
    """(ranks of the group, *shape)"""
    if group is None or group.size() == 1:
        return tensor.unsqueeze(0)
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)


class _Assembly:
    """Puts pieces together into tensors, and hands out each when it is whole."""

    def __init__(self, like: Checkpoint) -> None:
        self._like = like
        self._open: dict[str, tuple[Tensor, int]] = {}
        self._done: set[str] = set()

    def add(self, part: TensorSlice, shard: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The part of a tensor that lies in this shard."""
        if part.name in self._done:  # an output projection that is the embedding
            return
        tensor, missing = self._open.pop(part.name, None) or self._begun(part, shard)
        target = tensor[part.source]
        target.copy_(shard[part.target].reshape(target.shape))
        if missing > part.numel:
            self._open[part.name] = tensor, missing - part.numel
            return
        self._done.add(part.name)
        yield part.name, tensor

    def _begun(self, part: TensorSlice, shard: Tensor) -> tuple[Tensor, int]:
        tensor = torch.empty(part.whole, dtype=self._like.dtype(part.name), device=shard.device)
        return tensor, tensor.numel()

    def check_complete(self) -> None:
        """Raise if a tensor lacks a part."""
        if self._open:
            raise WeightMapError("the ranks do not hold all of a tensor", found=sorted(self._open)[:3])
