"""The weights of a Megatron-Core policy for an engine: each rank sends the shards it holds to the ranks that need them.

A shard that several ranks hold (data-parallel replicas, parameters that are not sharded) is sent by one of them, and
none is sent to a rank that holds it itself or that needs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.distributed.exchange import Exchange
from moe_replay.distributed.ranks import all_gather_text
from moe_replay.megatron.weights.checkpoint import FILE_BYTES, Checkpoint
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.export import write_folder
from moe_replay.megatron.weights.family import Family
from moe_replay.megatron.weights.local_shards import LocalModel, ParameterSpec
from moe_replay.megatron.weights.tensor_slices import TensorSlice
from moe_replay.megatron.weights.transfer import Chunks, Merging, WeightMap, check, export_order, gather
from moe_replay.rollout.weights.source import Group, TensorInfo

BUCKET_BYTES = 64 * 2**20
"""Shards that are in flight at once."""


class _Position(NamedTuple):
    """Coordinates of a rank in the groups that a model is sharded over."""

    stage: int
    tensor: int
    expert: int
    expert_tensor: int


class _Shard(NamedTuple):
    """A shard of a parameter: its coordinates, the ranks that hold it, and where its values go."""

    expert_rank: int
    rank: int
    holders: tuple[int, ...]
    parts: tuple[TensorSlice, ...]

    def sender(self, receiver: int) -> int:
        """Return the rank that a receiver gets the shard from: itself if it holds it."""
        return receiver if receiver in self.holders else self.holders[receiver % len(self.holders)]


class _Step(NamedTuple):
    """A parameter of a pipeline stage with all of its shards."""

    stage: int
    spec: ParameterSpec
    shards: tuple[_Shard, ...]

    @property
    def nbytes(self) -> int:
        """Size of all shards."""
        return len(self.shards) * math.prod(self.spec.shape) * self.spec.dtype.itemsize


class MegatronSource:
    """A `WeightSource` of the chunks of all ranks, with names, shapes and dtypes of a checkpoint. Made by all ranks.

    adapters   of the parameters on this rank, which are merged into them
    """

    def __init__(
        self,
        chunks: Chunks,
        like: Checkpoint,
        family: Family,
        adapters: Mapping[ParameterSpec, Merging] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._local = LocalModel.of(chunks)
        weight_map = WeightMap.of(family, like, self._local)
        check(like, self._local, weight_map)
        self._like = like
        self._info: dict[str, TensorInfo] = {}
        self._adapters = adapters or {}
        self._bucket_bytes = bucket_bytes
        self._positions = _positions(self._local)
        steps = list(self._steps(weight_map))
        self._layers = [list(of_layer) for _, of_layer in groupby(steps, key=lambda step: _place(step.spec))]

    def metadata(self) -> Sequence[TensorInfo]:
        """Return every tensor of the checkpoint, in the order of `groups`."""
        return list(self._info.values())

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        """Yield the tensors of each layer on `receivers`, and of what lies before and behind the layers.

        A list that has been yielded is emptied when the next one is requested.
        """
        parameters = dict(self._local.parameters)
        every = set(range(dist.get_world_size()))
        for steps in self._layers:
            group: Group = []
            assembly = _Assembly(self._info)
            if set(receivers) >= every:
                received = (self._gathered(step, parameters) for step in steps)
            else:
                received = (one for part in self._buckets(steps) for one in self._sent(part, receivers, parameters))
            for step, shards in received:
                for shard, values in zip(step.shards, shards, strict=True):
                    for part in shard.parts:
                        group.extend(assembly.add(part, values))
                del shards, values
            assembly.check_complete()
            yield group
            group.clear()

    # ---- what goes where ----------------------------------------------------------------------------------------

    def _steps(self, weight_map: WeightMap) -> Iterator[_Step]:
        """Yield every parameter of every stage in the order of export; the second of two tied ones is left out."""
        local = self._local
        missing: dict[str, int] = {}  # elements of each tensor
        for stage, spec in export_order(local):
            experts, shards = local.num_shards(spec)
            found = [
                _Shard(
                    expert_rank,
                    rank,
                    self._holders(stage, spec, expert_rank, rank),
                    tuple(weight_map.slices(local.shard(spec, expert_rank, rank))),
                )
                for expert_rank in range(experts)
                for rank in range(shards)
            ]
            parts = [part for one in found for part in one.parts]
            if all(missing.get(part.name) == 0 for part in parts):
                continue
            for part in parts:
                missing[part.name] = missing.get(part.name, math.prod(part.tensor_shape)) - part.numel
                if missing[part.name] == 0:
                    self._info[part.name] = TensorInfo(part.name, self._like.dtype(part.name), part.tensor_shape)
            yield _Step(stage, spec, tuple(found))

    def _holders(self, stage: int, spec: ParameterSpec, expert_rank: int, rank: int) -> tuple[int, ...]:
        def holds(position: _Position) -> bool:
            of_expert = spec.expert is not None
            here = position.expert_tensor if of_expert else position.tensor
            return (
                position.stage == stage
                and (not of_expert or position.expert == expert_rank)
                and (spec.partition_dim is None or here == rank)
            )

        return tuple(number for number, position in enumerate(self._positions) if holds(position))

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

    def _own(self, spec: ParameterSpec, parameters: Mapping[ParameterSpec, Tensor]) -> Tensor:
        """Return the shard of a parameter on this rank, with its adapter merged."""
        own = parameters[spec].detach()
        return self._adapters[spec].merged(own) if spec in self._adapters else own

    def _gathered(self, step: _Step, parameters: Mapping[ParameterSpec, Tensor]) -> tuple[_Step, list[Tensor]]:
        """Return all shards of a parameter, on every rank."""
        is_here = step.stage == self._local.groups.pipeline.rank()
        own = self._own(step.spec, parameters) if is_here else None
        shards = gather(self._local, step.spec, step.stage, own)
        return step, [shards[one.expert_rank, one.rank] for one in step.shards]

    def _sent(
        self, steps: Sequence[_Step], receivers: Collection[int], parameters: Mapping[ParameterSpec, Tensor]
    ) -> Iterator[tuple[_Step, list[Tensor]]]:
        """Yield all shards of some parameters on ranks that receive them; nothing on the others."""
        me, exchange = dist.get_rank(), Exchange()
        received: list[tuple[_Step, list[Tensor]]] = []
        for step in steps:
            own: Tensor | None = None
            if any(me in shard.holders for shard in step.shards):
                own = self._own(step.spec, parameters)
            shards: list[Tensor] = []
            for shard in step.shards:
                for receiver in sorted(receivers):
                    sender = shard.sender(receiver)
                    if own is not None and me == sender != receiver:
                        exchange.send(own, receiver)
                    elif me == receiver != sender:
                        shards.append(torch.empty(step.spec.shape, dtype=step.spec.dtype, device=self._local.device))
                        exchange.receive(shards[-1], sender)
                    elif own is not None and me == receiver:
                        shards.append(own)
            received.append((step, shards))
        exchange.run()
        if me in receivers:
            while received:
                yield received.pop(0)


def _place(spec: ParameterSpec) -> tuple[int | None, bool]:
    """Return the layer of a parameter, and whether it is an embedding."""
    return spec.layer, spec.key.startswith("embedding.")


def _positions(local: LocalModel) -> list[_Position]:
    """Return the coordinates of all ranks."""
    groups = local.groups
    own = [groups.pipeline.rank(), groups.tensor.rank(), groups.expert.rank(), groups.expert_tensor.rank()]
    return [_Position(*json.loads(text)) for text in all_gather_text(json.dumps(own))]


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
        """Raise if a tensor is incomplete."""
        if self._open:
            raise WeightMapError("the shards of all ranks do not cover a tensor", found=sorted(self._open)[:3])


# ---- folders --------------------------------------------------------------------------------------------------------


def write(chunks: Chunks, folder: str | Path, like: Checkpoint, family: Family, file_bytes: int = FILE_BYTES) -> None:
    """Write the current weights as a checkpoint folder, every rank some of its files. A collective call.

    Tensors of `like` that are not part of the model (multi-token prediction layers) are copied unchanged.
    """
    source = MegatronSource(chunks, like, family)
    write_folder(source, folder, like.folder, file_bytes, extra=_extra_tensors(like, family))


def _extra_tensors(like: Checkpoint, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are not part of the model, on rank 0, which writes them."""
    extra = family.extra_tensors(like.config)
    if extra is None or dist.get_rank() != 0:
        return
    for name in sorted(like.names):
        if extra.match(name):
            yield name, like.whole(name)
