"""The trainer's weights as vLLM's own transfer engines take them: every rank hands over the layers of its share.

vLLM calls this a `WeightSource` (vllm.distributed.weight_transfer.base): metadata of the whole model on every rank, the
names that this rank holds, and an iterator over its groups. Nothing of vLLM is imported here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from torch import Tensor

from moe_replay.distributed.ranks import rank, world_size
from moe_replay.errors import EngineError
from moe_replay.rollout.weights.source import Group, TensorInfo, Turns, WeightSource, layer_prefix


class LayerShares:
    """A `WeightSource` of vLLM's over one of ours. All ranks of the trainer have one.

    replicated   every rank gets every layer, instead of its share alone

    A layer is gathered on the ranks that hold it and on no other; to do so all ranks take part, in the order of the
    layers. After vLLM has taken this rank's last layer the ranks behind it still need its parts: `finish` gives them.
    """

    def __init__(self, source: WeightSource, *, replicated: bool = False) -> None:
        self._source = source
        self._metadata = list(source.metadata())
        self._groups = partition([info.name for info in self._metadata])
        size = world_size()
        self._holders = [range(size)] * len(self._groups) if replicated else holders(len(self._groups), size)
        self._running: Iterator[tuple[int, Group]] | None = None

    def use(self, source: WeightSource) -> None:
        """Read the next weights from a source of the same tensors."""
        self._source, self._running = source, None

    def metadata(self) -> list[TensorInfo]:
        """Return name, dtype and shape of every tensor of the model, on every rank."""
        return self._metadata

    def held_names(self) -> Collection[str]:
        """Return the tensors that this rank hands over."""
        return [name for group in self.groups() for name in group]

    def groups(self) -> list[list[str]]:
        """Return the names of each group of which this rank hands something over."""
        own = rank()
        return [group for group, ranks in zip(self._groups, self._holders, strict=True) if own in ranks]

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Yield names and full tensors of each group that this rank holds."""
        self._running = running = self._read()
        for number, group in running:
            if rank() not in self._holders[number]:
                continue
            names, tensors = [name for name, _ in group], [tensor for _, tensor in group]
            if names != self._groups[number]:
                raise EngineError(
                    "a layer of the weights has other tensors than the model's metadata",
                    layer=number,
                    expected=f"{len(self._groups[number])} from {self._groups[number][0]}",
                    found=f"{len(names)} from {next(iter(names), 'nothing')}",
                )
            yield names, tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for names, tensors in self.iter_groups():
            yield from zip(names, tensors, strict=True)

    def finish(self) -> None:
        """Take part in gathering what is left for other ranks; if nothing has been read yet, in all of it."""
        for _ in self._read() if self._running is None else self._running:
            pass
        self._running = None

    def _read(self) -> Iterator[tuple[int, Group]]:
        turns = Turns(self._holders)
        for number, group in enumerate(self._source.groups(turns)):
            yield number, group
            turns.advance()


def holders(groups: int, ranks: int) -> list[tuple[int, ...]]:
    """Return the ranks that hand over each group: consecutive ones for consecutive layers, like pipeline stages.

    Rank 0 has the last one, alone: it waits for the servers, which need all groups before. No rank is without a group.
    """
    shared = max(groups - 1, 1)
    of_group = [
        tuple(own for own in range(ranks) if own * shared // ranks == number)
        if ranks >= shared
        else (number * ranks // shared,)
        for number in range(shared)
    ]
    return [*of_group, (0,)][:groups]


def partition(names: Sequence[str]) -> list[list[str]]:
    """Return the names by layer, as vLLM divides them: what lies before the layers, each layer, what lies behind them.

    The names must be in this order already: it is that of the transfer.
    """
    before: list[str] = []
    behind: list[str] = []
    layers: dict[str, list[str]] = {}
    for name in names:
        layer = layer_prefix(name)
        if layer:
            layers.setdefault(layer, []).append(name)
        else:
            (behind if layers else before).append(name)
    groups = [group for group in (before, *layers.values(), behind) if group]
    moved = next((one for one, name in zip(chain.from_iterable(groups), names, strict=True) if one != name), None)
    if moved is not None:
        raise EngineError(
            "the tensors of a layer are not together, which vLLM's transfer engines need",
            found=moved,
            remedy='Set weights.kind = "nccl" or "http"',
        )
    return groups
