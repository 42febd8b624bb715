"""Loading a checkpoint folder into the model chunks of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.family import ADD_A_FAMILY, Family, Rules
from moe_replay.megatron.weights.local_shards import LocalModel
from moe_replay.megatron.weights.tensor_slices import ParameterShard, TensorSlice, WeightMapError
from moe_replay.weights.model_folder import check_dtypes

Chunks = nn.Module | Sequence[nn.Module]


class Merging(Protocol):
    """An adapter of a parameter on this rank, merged on export."""

    def merged(self, weight: Tensor) -> Tensor: ...


class WeightMap(NamedTuple):
    """The rules of one family for one checkpoint and one model."""

    family: Family
    model_type: str
    rules: Rules

    @classmethod
    def of(cls, family: Family, checkpoint: Checkpoint, model: LocalModel) -> WeightMap:
        """Choose the rules by the layout of the checkpoint's experts and the model's embeddings."""
        rules = family.rules_for(fused=checkpoint.is_fused, tied=model.is_tied)
        return cls(family, checkpoint.model_type, rules)

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        rule = self.rules.get(shard.key)
        if rule is None:
            raise WeightMapError(
                f"the weight map of {self.model_type} has no rule for the parameter {shard.key}",
                layer=shard.layer,
                found=f"shape {shard.full_shape}",
                remedy=f"Build the model with megatron_config(); {ADD_A_FAMILY}",
            )
        return rule.slices(shard)


# ---- load -----------------------------------------------------------------------------------------------------------


def load(checkpoint: Checkpoint, chunks: Chunks, family: Family) -> None:
    """Copy a checkpoint into the parameters of this rank, in place and cast to their dtype. Collective.

    Names and shapes of the whole model are checked on every rank before the first weight is written.
    """
    local = LocalModel.of(chunks)
    weight_map = WeightMap.of(family, checkpoint, local)
    check(checkpoint, local, weight_map)
    with torch.no_grad():
        for spec, tensor in local.parameters:
            for part in weight_map.slices(local.local_shard(spec)):
                target = tensor[part.target]
                target.copy_(part.oriented(checkpoint.read(part.name, part.source)).reshape(target.shape))


def check(checkpoint: Checkpoint, local: LocalModel, weight_map: WeightMap) -> None:
    """Raise unless the checkpoint has exactly the tensors of the whole model, in their shapes, as floats."""
    present = checkpoint.names
    model_type = weight_map.model_type
    expected = {
        part.name: (part.tensor_shape, shard) for shard in local.unsharded() for part in weight_map.slices(shard)
    }
    extra = weight_map.family.extra_tensors(checkpoint.config)
    unexpected = sorted(name for name in present - expected.keys() if extra is None or not extra.match(name))
    missing = sorted(expected.keys() - present)
    if missing:
        raise WeightMapError(
            f"{len(missing)} tensors are missing from the checkpoint ({model_type}), the first is {missing[0]}",
            layer=expected[missing[0]][1].layer,
            expected=f"shape {expected[missing[0]][0]} for {expected[missing[0]][1].key}",
            found=f"{len(present)} other tensors in {checkpoint.folder}",
        )
    if unexpected:
        raise WeightMapError(
            f"{len(unexpected)} tensors of the checkpoint ({model_type}) are not in the model, "
            f"the first is {unexpected[0]}",
            expected=f"{len(expected)} tensors",
            found=f"{unexpected[0]} of shape {checkpoint.shape(unexpected[0])}",
            remedy="Build the model from this checkpoint's config",
        )
    for name, (shape, shard) in expected.items():
        if checkpoint.shape(name) != shape:
            raise WeightMapError(
                f"the shape of tensor {name} ({model_type}) does not match {shard.key}",
                layer=shard.layer,
                expected=f"shape {shape}",
                found=f"shape {checkpoint.shape(name)}",
                remedy="Build the model from this checkpoint's config",
            )
    stored = {name: checkpoint.stored_dtype(name) for name in expected}
    check_dtypes(stored, dict.fromkeys(expected, True), checkpoint.folder, quantized=checkpoint.is_quantized)
