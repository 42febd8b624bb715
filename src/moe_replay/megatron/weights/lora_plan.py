"""Which parameters of a Megatron-Core model get a LoRA adapter, and what of the checkpoint each holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.family import Family
from moe_replay.megatron.weights.local_shards import LocalModel
from moe_replay.megatron.weights.tensor_slices import ParameterShard, TensorSlice
from moe_replay.megatron.weights.transfer import WeightMap

ALL_LINEAR = "all-linear"
ROUTER = "router"
_LINEAR = re.compile(r"^decoder\.layers\.\{layer\}\..*\.linear_\w+\.weight$")
_ROUTER = re.compile(r"^decoder\.layers\.\{layer\}\..*\.router\.weight$")


class Part(NamedTuple):
    """A weight of the checkpoint inside a parameter.

    name     in the checkpoint, which has a tensor for each expert
    rows     (rows,) of the parameter
    group    parts of one group share their `down`
    slices   from the tensor of the checkpoint to the parameter
    """

    name: str
    rows: Tensor
    group: int
    slices: tuple[TensorSlice, ...]


@dataclass(frozen=True)
class LoraPlan:
    """Rank and scale of the adapters, and the names of the layers that get one (see docs/lora.md)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    weight_map: WeightMap

    @classmethod
    def of(cls, rank: int, alpha: float, targets: tuple[str, ...], checkpoint: Checkpoint, family: Family) -> LoraPlan:
        """Return the plan for the model of a checkpoint; names are those of checkpoints with a tensor per expert."""
        rules = family.rules_for(fused=False, tied=False)
        return cls(rank, alpha, targets, WeightMap(family, checkpoint.model_type, rules))

    def parts(self, shard: ParameterShard) -> tuple[Part, ...]:
        """Return the weights in a shard that get an adapter; none for all other parameters."""
        is_router = bool(_ROUTER.search(shard.key))
        if not is_router and not _LINEAR.search(shard.key):
            return ()
        names = dict.fromkeys(each.name for each in self.weight_map.slices(shard.unsharded()))
        wanted = [name for name in names if self._wants(name, is_router=is_router)]
        here = self.weight_map.slices(shard)
        parts = []
        for group, name in enumerate(wanted):
            slices = tuple(each for each in here if each.name == name)
            parts.append(Part(name, _rows(slices), 0 if shard.expert is not None else group, slices))
        return tuple(parts)

    def _wants(self, name: str, *, is_router: bool) -> bool:
        by_kind = ROUTER if is_router else ALL_LINEAR
        return by_kind in self.targets or _leaf(name) in self.targets

    def check(self, model: LocalModel) -> None:
        """Raise, on every rank alike, if a target matches no layer of the whole model."""
        names: set[str] = set()
        has_router = False
        for shard in model.unsharded():
            is_router = bool(_ROUTER.search(shard.key))
            has_router |= is_router
            if is_router or _LINEAR.search(shard.key):
                slices = self.weight_map.slices(shard)
                names |= {_leaf(each.name) for each in slices}
                self._check_matrices(shard, [each for each in slices if self._wants(each.name, is_router=is_router)])
        known = {*names, ALL_LINEAR, *([ROUTER] if has_router else [])}
        for target in self.targets:
            if target not in known:
                raise WeightMapError(
                    "model.lora_targets: no layer of this model on Megatron-Core has this name",
                    expected=f"some of {', '.join(sorted(known))}",
                    found=repr(target),
                )

    @staticmethod
    def _check_matrices(shard: ParameterShard, slices: Sequence[TensorSlice]) -> None:
        for each in slices:
            if len(each.tensor_shape) != 2 or each.transposed:
                raise WeightMapError(
                    "model.lora_targets: checkpoints of this family have no matrix of their own for this layer",
                    layer=shard.layer,
                    expected="a tensor (out, in), one for each expert",
                    found=f"{each.name} of shape {each.tensor_shape}",
                    remedy="Leave experts out of model.lora_targets, or set backend.kind = fsdp",
                )


def _rows(slices: Sequence[TensorSlice]) -> Tensor:
    ranges = [torch.arange(each.target[0].start, each.target[0].stop) for each in slices]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long)


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
