"""Rules that map a parameter shard of Megatron-Core to slices of checkpoint tensors, for both directions.

A rule takes the shard of one parameter on one rank and lists the slices of checkpoint tensors that make it up.
Loading copies each slice from its tensor into the shard; exporting copies the same slices back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from moe_replay.errors import MoeReplayError

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


class WeightMapError(MoeReplayError):
    """A checkpoint, a family and a Megatron-Core model that do not match; raised before any weight is written."""


class TensorSlice(NamedTuple):
    """A slice of a checkpoint tensor and its position in a parameter shard."""

    name: str  # of the tensor
    tensor_shape: Shape  # of the whole tensor
    source: Slices  # slices of the tensor; may have a leading expert dimension that the shard lacks
    target: Slices  # slices of the shard, with the same number of elements
    transposed: bool = False  # the last two dimensions of the tensor are those of the shard, swapped

    @property
    def numel(self) -> int:
        ranges = (range(*part.indices(size)) for part, size in zip(self.source, self.tensor_shape, strict=True))
        return math.prod(map(len, ranges))

    def oriented(self, region: Tensor) -> Tensor:
        """Return a view of the tensor's `source` region with the shard's order of dimensions."""
        return region.transpose(-2, -1) if self.transposed else region


@dataclass(frozen=True)
class ParameterShard:
    """A rank's shard of a parameter.

    layer, expert  global indices, or None
    rank, size     of this shard, and the number of shards
    """

    key: str  # the parameter, e.g. "decoder.layers.{layer}.mlp.linear_fc1.weight"
    shape: Shape  # of the shard
    partition_dim: int | None  # along which the parameter is sharded, or None
    layer: int | None
    expert: int | None
    config: Any  # Megatron-Core's `TransformerConfig`
    rank: int = 0
    size: int = 1

    @property
    def full_shape(self) -> Shape:
        return tuple(size * self.size if dim == self.partition_dim else size for dim, size in enumerate(self.shape))

    def unsharded(self) -> ParameterShard:
        """Return the whole parameter as a single shard."""
        return replace(self, shape=self.full_shape, rank=0, size=1)

    def tensor_name(self, template: str) -> str:
        """Fill layer and expert into a name with `{layer}` and `{expert}`."""
        return template.format(layer=self.layer, expert=self.expert)

    def rows_of(self, template: str, total: int, source: slice, target: int) -> TensorSlice:
        """Return rows of a tensor of `total` rows, which stand from row `target` on in this shard."""
        rest, count = self.shape[1:], len(range(total)[source])
        whole = (total, *rest)
        return TensorSlice(
            self.tensor_name(template), whole, (source, *_all(rest)), (slice(target, target + count), *_all(rest))
        )


class Rule(Protocol):
    """Maps one kind of parameter to checkpoint tensors."""

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        """Return the slices that make up the shard; together they cover every element once."""
        ...


@dataclass(frozen=True)
class Plain:
    """A parameter stored as one checkpoint tensor of the same shape."""

    name: str

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        source = [slice(0, size) for size in shard.shape]
        if shard.partition_dim is not None:
            length = shard.shape[shard.partition_dim]
            source[shard.partition_dim] = slice(shard.rank * length, (shard.rank + 1) * length)
        return [TensorSlice(shard.tensor_name(self.name), shard.full_shape, tuple(source), _all(shard.shape))]


class _Rows(NamedTuple):
    """Consecutive rows of a parameter: `length` rows of a tensor of `total` rows, from `start` on."""

    name: str
    total: int
    start: int
    length: int


def _cut_rows(shard: ParameterShard, blocks: list[_Rows]) -> list[TensorSlice]:
    """Return a shard's part of a parameter that is the concatenation of these blocks."""
    rows = shard.shape[0]
    _check_rows(shard, sum(block.length for block in blocks))
    begin, end, offset, slices = shard.rank * rows, (shard.rank + 1) * rows, 0, []
    for block in blocks:
        first, last = max(offset, begin), min(offset + block.length, end)
        if first < last:
            inside = block.start - offset
            slices.append(shard.rows_of(block.name, block.total, slice(first + inside, last + inside), first - begin))
        offset += block.length
    return slices


@dataclass(frozen=True)
class GroupedQkv:
    """The fused QKV projection: per query group its queries, its key, its value."""

    query: str
    key: str
    value: str

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        config = shard.config
        groups, width = config.num_query_groups, config.kv_channels
        parts = [
            (self.query, config.num_attention_heads // groups * width),
            (self.key, width),
            (self.value, width),
        ]
        blocks = [
            _Rows(name, groups * length, group * length, length) for group in range(groups) for name, length in parts
        ]
        return _cut_rows(shard, blocks)


@dataclass(frozen=True)
class GatedQkv:
    """The fused projection of gated attention: per query group its queries, their gates, its key, its value.

    The query tensor holds query and gate of each head.
    """

    query: str
    key: str
    value: str

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        config = shard.config
        heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
        blocks = []
        for group in range(groups):
            group_heads = range(group * heads // groups, (group + 1) * heads // groups)
            for gate in (0, 1):
                first_rows = [(2 * head + gate) * width for head in group_heads]
                blocks += [_Rows(self.query, 2 * heads * width, first, width) for first in first_rows]
            blocks += [_Rows(name, groups * width, group * width, width) for name in (self.key, self.value)]
        return _cut_rows(shard, blocks)


@dataclass(frozen=True)
class Sections:
    """Consecutive sections of rows in a tensor, each sharded separately; `sizes`: config -> rows per section."""

    name: str
    sizes: Callable[[Any], tuple[int, ...]]

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        sizes = self.sizes(shard.config)
        _check_rows(shard, sum(sizes))
        slices, begin, target = [], 0, 0
        for size in sizes:
            rows = size // shard.size
            first = begin + shard.rank * rows
            slices.append(shard.rows_of(self.name, sum(sizes), slice(first, first + rows), target))
            begin, target = begin + size, target + rows
        return slices


@dataclass(frozen=True)
class GateUp:
    """Gate and up projection of a gated MLP, each sharded separately; without `up`, both stacked in one tensor."""

    gate: str
    up: str | None = None

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        half, features = shard.shape[0] // 2, shard.full_shape[0] // 2
        _check_rows(shard, 2 * features)
        total, offset = (2 * features, features) if self.up is None else (features, 0)
        gate = slice(shard.rank * half, (shard.rank + 1) * half)
        up = slice(gate.start + offset, gate.stop + offset)
        return [shard.rows_of(self.gate, total, gate, 0), shard.rows_of(self.up or self.gate, total, up, half)]


@dataclass(frozen=True)
class AlternatingGateUp:
    """Gate and up projection of a gated MLP in one tensor: gate has the even rows, up the odd ones."""

    name: str

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        half, total = shard.shape[0] // 2, shard.full_shape[0]
        _check_rows(shard, 2 * (total // 2))
        first, last = 2 * shard.rank * half, 2 * (shard.rank + 1) * half
        return [shard.rows_of(self.name, total, slice(first + part, last, 2), part * half) for part in (0, 1)]


@dataclass(frozen=True)
class Transposed:
    """A matrix whose checkpoint tensor is transposed."""

    each: Rule

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        return [
            part._replace(tensor_shape=part.tensor_shape[::-1], source=part.source[::-1], transposed=True)
            for part in self.each.slices(shard)
        ]


@dataclass(frozen=True)
class Stacked:
    """All experts of a layer in one tensor, with the expert as leading dimension."""

    each: Rule

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        expert, count = shard.expert, shard.config.num_moe_experts
        assert expert is not None
        return [
            part._replace(tensor_shape=(count, *part.tensor_shape), source=(slice(expert, expert + 1), *part.source))
            for part in self.each.slices(shard)
        ]


def _all(shape: list[int] | Shape) -> Slices:
    return tuple(slice(0, size) for size in shape)


def _check_rows(shard: ParameterShard, expected: int) -> None:
    if shard.full_shape[0] != expected:
        raise WeightMapError(
            f"the number of rows of {shard.key} does not match the model config",
            layer=shard.layer,
            expected=expected,
            found=f"{shard.full_shape[0]}, in {shard.size} shards of {shard.shape[0]}",
        )
