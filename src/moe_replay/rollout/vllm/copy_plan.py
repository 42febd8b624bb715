"""Where each tensor of a checkpoint ends up in vLLM's parameters, learned from an update by vLLM's own loaders.

The loaders run Python for every tensor of every expert, several times: thousands of calls a layer. What they do is copy
slices of tensors into slices of parameters, the same ones in every update. The first update records those copies, and
compares each parameter with what was copied into it when vLLM has processed it. If all are equal, and nothing else is
computed from the tensors, later updates are the copies alone. Otherwise vLLM's loaders do every update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_replay.errors import EngineError
from moe_replay.rollout.weights.source import TensorInfo
from moe_replay.rollout.weights.staging import copy_all


class _Slice(NamedTuple):
    """A part of a tensor's memory, by elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Slice:
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def within(self, tensor: Tensor) -> Tensor:
        return torch.as_strided(tensor, self.size, self.stride, self.offset)


@dataclass(slots=True)
class _Write:
    """A copy of a slice of an incoming tensor into memory of a layer that is being loaded."""

    name: str
    source: Tensor
    target: _Slice


@dataclass(slots=True)
class CopyPlan:
    """The copies of one worker: for each tensor of the checkpoint, slices of it and where they go.

    infos    of every tensor that an update consists of
    copies   none for a tensor that this worker does not hold
    """

    infos: dict[str, TensorInfo] = field(default_factory=dict)
    copies: dict[str, list[tuple[_Slice, Tensor]]] = field(default_factory=dict)

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise at the first tensor that the plan does not know as it is."""
        for name, tensor in tensors:
            known = self.infos.get(name)
            if known is None:
                raise EngineError("no such tensor in earlier updates", found=name)
            if known.shape != tuple(tensor.shape):
                raise EngineError(f"wrong shape of {name}", expected=known.shape, found=tuple(tensor.shape))

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors to where they belong, after a check of all of them."""
        self.check(tensors)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name, tensor in tensors:
            for part, target in self.copies.get(name, ()):
                targets.append(target)
                whole = part.offset == 0 and part.size == tensor.shape and part.stride == tensor.stride()
                sources.append(tensor if whole else _part(tensor, part))
        copy_all(targets, sources)


def _part(tensor: Tensor, part: _Slice) -> Tensor:
    return torch.as_strided(tensor, part.size, part.stride, tensor.storage_offset() + part.offset)


class CopyRecorder(TorchDispatchMode):
    """Records, while it is active, what becomes of the tensors that were announced to it."""

    def __init__(self) -> None:
        super().__init__()
        self._infos: dict[str, TensorInfo] = {}
        self._incoming: dict[int, tuple[str, StorageWeakRef]] = {}  # by address of their memory
        self._loading: dict[int, tuple[Tensor, list[_Write]]] = {}  # memory of layers that are being loaded
        self._copies: dict[str, list[tuple[_Slice, Tensor]]] = {}
        self._unequal: list[Tensor] = []
        self._reason = ""

    def announce(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Tell which tensors are loaded next; each has its own memory.

        vLLM keeps them until their layer is complete, which may be after tensors that are announced later. Those that
        it has let go of are forgotten: their memory may hold something else.
        """
        self._incoming = {key: kept for key, kept in self._incoming.items() if not kept[1].expired()}
        for name, tensor in tensors:
            self._infos[name] = TensorInfo.of(name, tensor)
            self._incoming[_memory(tensor)] = (name, StorageWeakRef(tensor.untyped_storage()))

    def _incoming_name(self, tensor: Tensor) -> str | None:
        """Return the name of the announced tensor that a tensor shares its memory with."""
        name, storage = self._incoming.get(_memory(tensor), ("", None))
        return None if storage is None or storage.expired() else name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
        else:
            self._used(args, result)
        return result

    def _copied(self, target: Tensor, source: Tensor) -> None:
        if target.is_meta or source.is_meta or _memory(target) == _memory(source):
            return
        name = self._incoming_name(source)
        if name is not None:
            _, writes = self._loading.setdefault(_memory(target), (target, []))
            writes.append(_Write(name, source, _Slice.of(target)))
            return
        loaded = self._loading.pop(_memory(source), None)
        if loaded is not None:
            self._placed(target, source, loaded[1])

    def _placed(self, target: Tensor, source: Tensor, writes: list[_Write]) -> None:
        """Note where the content of a loaded parameter has gone, if it is there as it was loaded."""
        if _Slice.of(target) != _Slice.of(source):
            self._reason = self._reason or f"{writes[0].name} is stored in another layout"
            return
        if sum(math.prod(write.target.size) for write in writes) < target.numel():
            self._reason = self._reason or f"not all of what {writes[0].name} is a part of was copied"
            return
        for write in writes:
            place = write.target.within(target)
            self._unequal.append((place != write.source.to(place.dtype)).any())
            self._copies.setdefault(write.name, []).append((_Slice.of(write.source), place))

    def _used(self, args: Any, result: Any) -> None:
        """Note a tensor from which something else is computed than a copy."""
        outputs = {_memory(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_meta}
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                name = self._incoming_name(leaf)
                if name is not None and outputs and _memory(leaf) not in outputs:
                    self._reason = self._reason or f"{name} is converted while it is loaded"

    def plan(self) -> tuple[CopyPlan | None, str]:
        """Return the plan of the update that was recorded; without one, why."""
        pending = [writes[0].name for _, writes in self._loading.values()]
        if not self._reason and pending:
            self._reason = f"{pending[0]} is stored in another layout"
        if not self._reason and self._unequal and bool(torch.stack(self._unequal).any()):
            self._reason = "weights are changed after they were loaded"
        if not self._reason and not self._copies:
            self._reason = "nothing was copied"
        self._incoming, self._loading, self._unequal = {}, {}, []
        return (None, self._reason) if self._reason else (CopyPlan(self._infos, self._copies), "")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
