"""Where an engine's new weights come from: the trainer's parameters in checkpoint form, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_replay.distributed.ranks import rank

Group = list[tuple[str, Tensor]]
"""Full tensors of one layer, under their names in the checkpoint."""


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint, without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        """Describe a tensor."""
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """The policy's weights on one rank of the trainer. Every method is a collective call of all of its ranks."""

    def metadata(self) -> Sequence[TensorInfo]:
        """Return every tensor in checkpoint form, in the order of `groups`; the same on all ranks."""
        ...

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        """Yield the full tensors, one layer at a time, anew in every call; all ranks must exhaust it.

        receivers   ranks that get the tensors, read anew for each layer (`Turns`); the lists of others are empty, as
                    many of them

        A group is valid until the next one is requested, and no rank holds more than one.
        """
        ...


class Turns(Collection[int]):
    """Receivers that change from layer to layer.

    holders   ranks that get each group
    """

    def __init__(self, holders: Sequence[Collection[int]]) -> None:
        self._holders = [frozenset(one) for one in holders]
        self._number = 0

    def advance(self) -> None:
        """Advance to the next group."""
        self._number = min(self._number + 1, len(self._holders) - 1)

    def __contains__(self, rank: object) -> bool:
        return rank in self._holders[self._number]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._holders[self._number]))

    def __len__(self) -> int:
        return len(self._holders[self._number])


class IteratorSource:
    """A source made of an iterator that yields every tensor on every rank, such as `Backend.weights`.

    read   returns a new iterator over (name, tensor)
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self._read = read
        self._metadata: list[TensorInfo] | None = None

    def metadata(self) -> Sequence[TensorInfo]:
        """Return every tensor; the first call reads all of them, unless `groups` has."""
        if self._metadata is None:
            for _ in self.groups():
                pass
        assert self._metadata is not None
        return self._metadata

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        """Yield consecutive tensors of one layer together."""
        seen: list[TensorInfo] = []
        group: Group = []
        current: str | None = None
        for name, tensor in self._read():
            seen.append(TensorInfo.of(name, tensor))
            layer = layer_prefix(name)
            if len(seen) > 1 and layer != current:
                yield group
                group = []
            current = layer
            if rank() in receivers:
                group.append((name, tensor))
        if seen:
            yield group
        self._metadata = seen


def layer_prefix(name: str) -> str:
    """Return the part of a tensor's name that all tensors of its layer share; empty outside of layers.

    It ends with the first number: `model.layers.3.mlp.experts.7.up_proj.weight` is of `model.layers.3`.
    """
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def tensors_of(source: WeightSource, receivers: Collection[int] = (0,)) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a source one by one."""
    for group in source.groups(receivers):
        yield from group
