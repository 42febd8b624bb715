"""The adapters of a Megatron-Core model on all ranks, under PEFT's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from moe_replay.megatron.weights.local_shards import LocalModel, ParameterSpec
from moe_replay.megatron.weights.lora_plan import LoraPlan
from moe_replay.megatron.weights.tensor_slices import ParameterShard
from moe_replay.megatron.weights.transfer import Chunks, export_order, gather
from moe_replay.rollout.adapter import module_names


class Factors(Protocol):
    """The two matrices of an adapter on this rank."""

    @property
    def down(self) -> Tensor:
        """(groups * rank, in)."""
        ...

    @property
    def up(self) -> Tensor:
        """(out, rank)."""
        ...


def adapter_tensors(
    chunks: Chunks, plan: LoraPlan, adapters: Mapping[ParameterSpec, Factors]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all adapters unsharded in float32, on every rank. A collective: all ranks must iterate to the end."""
    local = LocalModel.of(chunks)
    for stage, spec in export_order(local):
        sample = plan.parts(local.shard(spec, 0, 0))
        if not sample:
            continue
        groups = 1 + max(part.group for part in sample)
        own = adapters.get(spec) if stage == local.groups.pipeline.rank() else None
        of_up = spec._replace(shape=(spec.shape[0], plan.rank), partition_dim=0 if spec.partition_dim == 0 else None)
        of_down = spec._replace(
            shape=(groups * plan.rank, spec.shape[1]), partition_dim=1 if spec.partition_dim == 1 else None
        )
        ups = gather(local, of_up, stage, None if own is None else own.up)
        downs = gather(local, of_down, stage, None if own is None else own.down)
        for expert_rank in range(len(ups)):
            down = torch.cat(list(downs[expert_rank]), dim=1).float()
            yield from _of_parameter(local, plan, of_up, expert_rank, ups[expert_rank], down)


def _of_parameter(
    local: LocalModel,
    plan: LoraPlan,
    of_up: ParameterSpec,
    expert_rank: int,
    ups: Tensor,
    down: Tensor,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of the weights in one parameter of one expert-parallel rank."""
    assembled: dict[str, Tensor] = {}
    for rank, up in enumerate(ups):
        shard: ParameterShard = local.shard(of_up, expert_rank, rank)
        for part in plan.parts(shard):
            for each in part.slices:
                whole = assembled.setdefault(part.name, up.new_empty(each.tensor_shape, dtype=torch.float32))
                whole[each.source] = up[each.target].float()
    for part in plan.parts(local.shard(of_up, expert_rank, 0)):
        first = part.group * plan.rank
        name_down, name_up = module_names(part.name)
        yield name_down, down[first : first + plan.rank]
        yield name_up, assembled[part.name]
