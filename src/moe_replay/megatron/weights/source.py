"""`MegatronSource`: full checkpoint tensors of a Megatron-Core policy, from the shards of all ranks.

Each rank sends its shards to the ranks that receive weights. A shard that several ranks hold (data-parallel replicas,
unsharded parameters) is sent by one of them, and never to a rank that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.distributed.collectives import Exchange
from moe_replay.distributed.ranks import all_gather_json
from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.family import Family
from moe_replay.megatron.weights.loading import Chunks, Merging, WeightMap, check
from moe_replay.megatron.weights.local_shards import LocalModel, ParameterSpec, export_order, gather
from moe_replay.megatron.weights.tensor_slices import TensorSlice, WeightMapError
from moe_replay.weights.source import Group, TensorInfo

BUCKET_BYTES = 64 * 2**20
"""Maximum bytes of shards in flight."""


class _Position(NamedTuple):
    """Coordinates of a rank in the groups that a model is sharded over."""

    stage: int
    tensor: int
    expert: int
    expert_tensor: int


class _Shard(NamedTuple):
    """A shard of a parameter: its coordinates, the ranks that hold it, and its slices of checkpoint tensors."""

    expert_rank: int
    rank: int
    holders: tuple[int, ...]
    parts: tuple[TensorSlice, ...]

    def sender(self, receiver: int) -> int:
        """Return the rank that sends the shard to `receiver`: itself if it holds it."""
        return receiver if receiver in self.holders else self.holders[receiver % len(self.holders)]


class _Step(NamedTuple):
    """A parameter of a pipeline stage with all of its shards."""

    stage: int
    spec: ParameterSpec
    shards: tuple[_Shard, ...]

    @property
    def nbytes(self) -> int:
        return len(self.shards) * math.prod(self.spec.shape) * self.spec.dtype.itemsize


class MegatronSource:
    """A `WeightSource` with the names, shapes and dtypes of the checkpoint `like`. Construct on all ranks: collective.

    adapters   of this rank's parameters, merged into them
    """

    def __init__(
        self,
        chunks: Chunks,
        like: Checkpoint,
        family: Family,
        adapters: Mapping[ParameterSpec, Merging] | None = None,
    ) -> None:
        self._local = LocalModel.of(chunks)
        weight_map = WeightMap.of(family, like, self._local)
        check(like, self._local, weight_map)
        self._parameters = dict(self._local.parameters)
        self._like = like
        self._info: dict[str, TensorInfo] = {}
        self._adapters = adapters or {}
        self._bucket_bytes = BUCKET_BYTES
        self._positions = _positions(self._local)
        steps = list(self._steps(weight_map))
        by_layer = groupby(steps, key=lambda step: (step.spec.layer, step.spec.key.startswith("embedding.")))
        self._layers = [list(of_layer) for _, of_layer in by_layer]

    def metadata(self) -> Sequence[TensorInfo]:
        """Return every tensor of the checkpoint, in the order of `groups`."""
        return list(self._info.values())

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        """Yield the tensors of embeddings, each layer and the rest on `receivers`; empty lists on other ranks.

        A yielded list is cleared when the next one is requested.
        """
        all_ranks = set(range(dist.get_world_size()))
        for steps in self._layers:
            group: Group = []
            assembly = _Assembly(self._info)
            if set(receivers) >= all_ranks:
                received = map(self._gathered, steps)
            else:
                received = (item for bucket in self._buckets(steps) for item in self._sent(bucket, receivers))
            for step, shards in received:
                for shard, values in zip(step.shards, shards, strict=True):
                    for part in shard.parts:
                        group.extend(assembly.add(part, values))
                del shards, values
            assembly.check_complete()
            yield group
            group.clear()

    # ---- routing of shards --------------------------------------------------------------------------------------

    def _steps(self, weight_map: WeightMap) -> Iterator[_Step]:
        """Yield every parameter of every stage in export order; the second of two tied ones is skipped."""
        local = self._local
        missing: dict[str, int] = {}  # elements of each tensor
        for stage, spec in export_order(local):
            num_expert_ranks, num_ranks = local.num_shards(spec)
            shards = [
                _Shard(
                    expert_rank,
                    rank,
                    self._holders(stage, spec, expert_rank, rank),
                    tuple(weight_map.slices(local.shard(spec, expert_rank, rank))),
                )
                for expert_rank in range(num_expert_ranks)
                for rank in range(num_ranks)
            ]
            parts = [part for shard in shards for part in shard.parts]
            if all(missing.get(part.name) == 0 for part in parts):
                continue
            for part in parts:
                missing[part.name] = missing.get(part.name, math.prod(part.tensor_shape)) - part.numel
                if missing[part.name] == 0:
                    self._info[part.name] = TensorInfo(part.name, self._like.dtype(part.name), part.tensor_shape)
            yield _Step(stage, spec, tuple(shards))

    def _holders(self, stage: int, spec: ParameterSpec, expert_rank: int, rank: int) -> tuple[int, ...]:
        def holds(position: _Position) -> bool:
            of_expert = spec.expert is not None
            here = position.expert_tensor if of_expert else position.tensor
            return (
                position.stage == stage
                and (not of_expert or position.expert == expert_rank)
                and (spec.partition_dim is None or here == rank)
            )

        return tuple(rank for rank, position in enumerate(self._positions) if holds(position))

    def _buckets(self, steps: Sequence[_Step]) -> Iterator[list[_Step]]:
        bucket: list[_Step] = []
        size = 0
        for step in steps:
            if bucket and size + step.nbytes > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(step)
            size += step.nbytes
        if bucket:
            yield bucket

    # ---- transfers ----------------------------------------------------------------------------------------------

    def _local_values(self, spec: ParameterSpec) -> Tensor:
        """Return this rank's shard of a parameter, with its adapter merged."""
        values = self._parameters[spec].detach()
        return self._adapters[spec].merged(values) if spec in self._adapters else values

    def _gathered(self, step: _Step) -> tuple[_Step, list[Tensor]]:
        """Return all shards of a parameter, on every rank."""
        is_local = step.stage == self._local.groups.pipeline.rank()
        values = self._local_values(step.spec) if is_local else None
        shards = gather(self._local, step.spec, step.stage, values)
        return step, [shards[shard.expert_rank, shard.rank] for shard in step.shards]

    def _sent(self, steps: Sequence[_Step], receivers: Collection[int]) -> Iterator[tuple[_Step, list[Tensor]]]:
        """Yield all shards of some parameters on receiving ranks; nothing on the others."""
        me, exchange = dist.get_rank(), Exchange()
        received: list[tuple[_Step, list[Tensor]]] = []
        for step in steps:
            values: Tensor | None = None
            if any(me in shard.holders for shard in step.shards):
                values = self._local_values(step.spec)
            shards: list[Tensor] = []
            for shard in step.shards:
                for receiver in sorted(receivers):
                    sender = shard.sender(receiver)
                    if values is not None and me == sender != receiver:
                        exchange.send(values, receiver)
                    elif me == receiver != sender:
                        shards.append(torch.empty(step.spec.shape, dtype=step.spec.dtype, device=self._local.device))
                        exchange.receive(shards[-1], sender)
                    elif values is not None and me == receiver:
                        shards.append(values)
            received.append((step, shards))
        exchange.run()
        if me in receivers:
            while received:
                yield received.pop(0)


def _positions(local: LocalModel) -> list[_Position]:
    """Return the coordinates of all ranks. Collective."""
    groups = local.groups
    coordinates = [groups.pipeline.rank(), groups.tensor.rank(), groups.expert.rank(), groups.expert_tensor.rank()]
    return [_Position(*of_rank) for of_rank in all_gather_json(coordinates)]


class _Assembly:
    """Assembles checkpoint tensors from slices and yields each when it is complete."""

    def __init__(self, info: Mapping[str, TensorInfo]) -> None:
        self._info = info
        self._open: dict[str, tuple[Tensor, int]] = {}

    def add(self, part: TensorSlice, shard: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Copy a slice out of a shard; yield its tensor if that completes it."""
        tensor, missing = self._open.pop(part.name, None) or self._new_tensor(part, shard)
        target = part.oriented(tensor[part.source])
        target.copy_(shard[part.target].reshape(target.shape))
        if missing > part.numel:
            self._open[part.name] = tensor, missing - part.numel
        else:
            yield part.name, tensor

    def _new_tensor(self, part: TensorSlice, shard: Tensor) -> tuple[Tensor, int]:
        tensor = torch.empty(part.tensor_shape, dtype=self._info[part.name].dtype, device=shard.device)
        return tensor, tensor.numel()

    def check_complete(self) -> None:
        if self._open:
            raise WeightMapError("the shards of all ranks do not cover a tensor", found=sorted(self._open)[:3])


def extra_tensors(like: Checkpoint, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Yield, on rank 0, the checkpoint tensors that are not part of the model."""
    extra = family.extra_tensors(like.config)
    if extra is None or dist.get_rank() != 0:
        return
    for name in sorted(like.names):
        if extra.match(name):
            yield name, like.whole(name)
