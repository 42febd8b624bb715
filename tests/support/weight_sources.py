"""A weight source over an iterator of tensors, for tests that need no sharded policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from torch import Tensor

from moe_replay.distributed.ranks import rank
from moe_replay.weights.source import Group, TensorInfo


def layer_prefix(name: str) -> str:
    """Return the part of a tensor's name that all tensors of its layer share; empty outside of layers.

    It ends with the first number: `model.layers.3.mlp.experts.7.up_proj.weight` is of `model.layers.3`.
    """
    parts = name.split(".")
    index = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if index is None else ".".join(parts[: index + 1])


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
