"""How a parameter of Megatron-Core lies in the tensors of a checkpoint, said once for both directions.

A rule takes the shard of one parameter that one rank holds and says which pieces of which tensors it is made of.
Loading copies each part from the tensor into the shard; exporting copies the same pieces back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from moe_replay.megatron.weights.errors import WeightMapError

Shape = tuple[int, ...]
Slices = tuple[slice, ...]


class TensorSlice(NamedTuple):
    """A part of a tensor of the checkpoint, and where it lies in a shard.

    name    of the tensor
    whole   shape of the tensor
    source  region of the tensor; may have a leading expert that the shard has not
    target  region of the shard, of as many elements
    """

    name: str
    whole: Shape
    source: Slices
    target: Slices

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(len(range(*part.indices(size))) for part, size in zip(self.source, self.whole, strict=True))


@dataclass(frozen=True)
class ParameterShard:
    """What one rank holds of one parameter.

    key     the parameter, e.g. "decoder.layers.{layer}.mlp.linear_fc1.weight"
    shape   of the shard
    dim     along which the parameter is cut, or None
    layer, expert  which of the whole model, if it is in one
    config  Megatron-Core's, of the whole model
    """

    key: str
    shape: Shape
    dim: int | None
    layer: int | None
    expert: int | None
    config: Any
    rank: int = 0
    size: int = 1

    @property
    def whole(self) -> Shape:
        """Shape of the parameter, uncut."""
        return tuple(size * self.size if dim == self.dim else size for dim, size in enumerate(self.shape))

    def uncut(self) -> ParameterShard:
        """All of the parameter as one shard."""
        return replace(self, shape=self.whole, rank=0, size=1)

    def named(self, template: str) -> str:
        """The name of a tensor of this layer and expert."""
        return template.format(layer=self.layer, expert=self.expert)


class Rule(Protocol):
    """How one kind of parameter lies in a checkpoint."""

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        """What the shard is made of; together they cover it."""
        ...


@dataclass(frozen=True)
class Plain:
    """The parameter is a tensor of the checkpoint."""

    name: str

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        source = [slice(0, size) for size in shard.shape]
        if shard.dim is not None:
            length = shard.shape[shard.dim]
            source[shard.dim] = slice(shard.rank * length, (shard.rank + 1) * length)
        return [TensorSlice(shard.named(self.name), shard.whole, tuple(source), _all(shard.shape))]


@dataclass(frozen=True)
class GroupedQkv:
    """Queries, keys and values of attention: group after group, the queries of one, its key, its value."""

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
        rows, *rest = shard.shape
        _check_rows(shard, groups * sum(length for _, length in parts))
        begin, end, at, found = shard.rank * rows, (shard.rank + 1) * rows, 0, []
        for group in range(groups):
            for name, length in parts:
                first, last = max(at, begin), min(at + length, end)
                if first < last:
                    inside = group * length - at
                    found.append(
                        TensorSlice(
                            shard.named(name),
                            (groups * length, *rest),
                            (slice(first + inside, last + inside), *_all(rest)),
                            (slice(first - begin, last - begin), *_all(rest)),
                        )
                    )
                at += length
        return found


@dataclass(frozen=True)
class GateUp:
    """The two input projections of a gated MLP, each cut by itself; one below the other in one tensor without `up`."""

    gate: str
    up: str | None = None

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        rows, *rest = shard.shape
        half, features = rows // 2, shard.whole[0] // 2
        _check_rows(shard, 2 * features)
        whole = (features * (2 if self.up is None else 1), *rest)
        offset = features if self.up is None else 0
        first = shard.rank * half

        def part(name: str, source: int, target: int) -> TensorSlice:
            return TensorSlice(
                shard.named(name),
                whole,
                (slice(source, source + half), *_all(rest)),
                (slice(target, target + half), *_all(rest)),
            )

        return [part(self.gate, first, 0), part(self.up or self.gate, first + offset, half)]


@dataclass(frozen=True)
class Stacked:
    """The experts of a layer lie in one tensor, expert first."""

    each: Rule

    def slices(self, shard: ParameterShard) -> list[TensorSlice]:
        expert, count = shard.expert, shard.config.num_moe_experts
        assert expert is not None
        return [
            part._replace(whole=(count, *part.whole), source=(slice(expert, expert + 1), *part.source))
            for part in self.each.slices(shard)
        ]


def _all(shape: list[int] | Shape) -> Slices:
    return tuple(slice(0, size) for size in shape)


def _check_rows(shard: ParameterShard, expected: int) -> None:
    if shard.whole[0] != expected:
        raise WeightMapError(
            f"the parameter {shard.key} has not the rows that its config promises",
            layer=shard.layer,
            expected=expected,
            found=f"{shard.whole[0]}, in {shard.size} shards of {shard.shape[0]}",
        )
