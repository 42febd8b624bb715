"""Source of an engine's new weights: the trainer's parameters in checkpoint form, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Group = list[tuple[str, Tensor]]
"""Full tensors of one layer, under their names in the checkpoint."""
Tensors = Iterable[tuple[str, Tensor]]
Weights = Tensors | Path
"""New weights for an engine, named and shaped as in the model's checkpoint: streamed, or a folder of safetensors."""


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint, without its values."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorInfo:
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """The policy's weights on one rank of the trainer. Every method is a collective call of all of its ranks."""

    def metadata(self) -> Sequence[TensorInfo]:
        """Return every tensor in checkpoint form, in the order of `groups`; the same on all ranks."""

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        """Yield the full tensors, one layer at a time, from the start in every call; all ranks must exhaust it.

        receivers   ranks that get the tensors, evaluated for each layer (`PerLayerReceivers`); other ranks get as many
                    empty lists

        A group is valid until the next one is requested, and no rank holds more than one.
        """


class HandedGroup(NamedTuple):
    """Tensors of one layer, on the ranks that hand them over.

    owner     the only rank that holds them; None: they are sharded, and gathered on the receivers
    tensors   empty on other ranks
    rows      of each tensor that is a part of a larger one, by name: its first row there, and the rows of the whole
    """

    owner: int | None
    tensors: Group
    rows: Mapping[str, tuple[int, int]]


@runtime_checkable
class DividedSource(Protocol):
    """A `WeightSource` of which some tensors are whole on one rank: experts that are divided among ranks."""

    def owners(self) -> tuple[int, ...]:
        """Return the ranks that hold such tensors; none: use `WeightSource.groups`."""

    def owned_groups(
        self, receivers: Collection[int], copies: Callable[[int], Collection[int]], *, parts: bool
    ) -> Iterator[HandedGroup]:
        """Yield all tensors as `groups` does, those of one rank where they are. Collective.

        receivers   ranks that get what no rank holds alone
        copies      returns the ranks that also get what an owner holds
        parts       a tensor that experts of several ranks make up is handed over by its rows, not gathered
        """


def owners_of(source: WeightSource) -> tuple[int, ...]:
    """Return the ranks that can hand over tensors which nobody else has."""
    return source.owners() if isinstance(source, DividedSource) else ()


class PerLayerReceivers(Collection[int]):
    """Receivers that change from layer to layer.

    holders   ranks that get each group
    """

    def __init__(self, holders: Sequence[Collection[int]]) -> None:
        self._holders = [frozenset(ranks) for ranks in holders]
        self._layer = 0

    def advance(self) -> None:
        self._layer = min(self._layer + 1, len(self._holders) - 1)

    def __contains__(self, rank: object) -> bool:
        return rank in self._holders[self._layer]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._holders[self._layer]))

    def __len__(self) -> int:
        return len(self._holders[self._layer])


def tensors_of(source: WeightSource, receivers: Collection[int] = (0,)) -> Iterator[tuple[str, Tensor]]:
    for group in source.groups(receivers):
        yield from group
