"""The weights of an FSDP2 policy for an engine: the shards of one layer at a time, sent to the ranks that need them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from moe_replay.distributed.exchange import Exchange
from moe_replay.rollout.weights.checkpoint import CheckpointForm, checkpoint_tensors
from moe_replay.rollout.weights.source import Group, TensorInfo
from moe_replay.train.backends.lora import AdaptedWeight, plain_name


class FsdpSource:
    """A `WeightSource` of a Transformers model that is sharded over all ranks.

    dtype     of the weights that are sent, the one that FSDP2 computes in
    adapted   weights with LoRA adapters, which are merged
    scale     of the adapters

    Buffers are not cast in training and travel as they are: a bfloat16 correction bias would choose other experts.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, adapted: Sequence[AdaptedWeight] = (), scale: float = 1.0
    ) -> None:
        self._model, self._dtype, self._scale = model, dtype, scale
        self._adapted = {one.weight: one for one in adapted}
        self._factors = {name for one in adapted for name in (one.down, one.up)}
        self._metadata: list[TensorInfo] | None = None

    def metadata(self) -> Sequence[TensorInfo]:
        """Return every tensor of the checkpoint, in the order of `groups`."""
        if self._metadata is None:
            empty = (
                (self._plain_name(name), torch.empty(tensor.shape, dtype=self._dtype_of(tensor), device="meta"))
                for name, tensor in self._state().items()
                if name not in self._factors
            )
            self._metadata = [TensorInfo.of(name, tensor) for name, tensor in checkpoint_tensors(self._model, empty)]
        return self._metadata

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        """Yield the tensors of each layer on `receivers`, and of what lies before and behind the layers.

        A list that has been yielded is emptied when the next one is requested.
        """
        state, form = self._state(), CheckpointForm(self._model)
        layers = [name for name, module in self._model.named_modules() if name and isinstance(module, FSDPModule)]
        layer_of = {name: layer for layer in layers for name in state if name.startswith(f"{layer}.")}
        for _, names in groupby(state, key=lambda name: layer_of.get(name, "")):
            group = self._group(state, [name for name in names if name not in self._factors], receivers, form)
            yield group
            group.clear()

    def _state(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model by name, tied parameters once."""
        every = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in self._model.named_parameters()}
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in tied}

    def _plain_name(self, name: str) -> str:
        one = self._adapted.get(name)
        return plain_name(name) if one is None else one.plain

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if isinstance(tensor, DTensor) else tensor.dtype

    def _group(
        self, state: Mapping[str, Tensor], names: Sequence[str], receivers: Collection[int], form: CheckpointForm
    ) -> Group:
        """Return the tensors of some parameters, one after the other: the checkpoint's form of one may be a copy."""
        group: Group = []
        for name in names:
            one = self._adapted.get(name)
            tensor = state[name].detach()
            if one is not None:
                whole = self._merged(one, state, receivers)
            else:
                (whole,) = _gathered([tensor.to(self._dtype_of(tensor))], receivers)
            del tensor
            if whole is not None:
                group.extend(form.tensors(self._plain_name(name), whole).items())
        return group

    def _merged(self, one: AdaptedWeight, state: Mapping[str, Tensor], receivers: Collection[int]) -> Tensor | None:
        parts = [state[name].detach() for name in (one.weight, one.down, one.up)]
        weight, down, up = _gathered(parts, receivers)
        if weight is None or down is None or up is None:
            return None
        return one.merged(weight, down, up, self._scale).to(self._dtype)


def _gathered(tensors: Sequence[Tensor], receivers: Collection[int]) -> list[Tensor | None]:
    """Return the whole tensors; None on ranks that do not receive them."""
    exchange = Exchange()
    whole = [_gather(tensor, receivers, exchange) for tensor in tensors]
    exchange.run()
    return whole


def _gather(tensor: Tensor, receivers: Collection[int], exchange: Exchange) -> Tensor | None:
    """Return a tensor that is whole once the exchange has run; None on ranks that do not receive it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return tensor if rank in receivers else None
    if set(receivers) >= set(range(size)) or not _is_sharded_by_rows(tensor):
        whole: Tensor = tensor.full_tensor()
        return whole if rank in receivers else None
    local, (rows, *rest) = tensor.to_local(), tensor.shape
    if rank not in receivers:
        for receiver in sorted(receivers):
            exchange.send(local, receiver)
        return None
    whole = torch.empty((rows, *rest), dtype=local.dtype, device=local.device)
    for other, part in enumerate(_row_chunks(whole, size)):
        if other == rank:
            part.copy_(local)
        else:
            exchange.receive(part, other)
    for receiver in sorted(set(receivers) - {rank}):
        exchange.send(local, receiver)
    return whole


def _is_sharded_by_rows(tensor: DTensor) -> bool:
    placements: tuple[Any, ...] = tensor.placements
    return len(placements) == 1 and type(placements[0]) is Shard and placements[0].dim == 0


def _row_chunks(whole: Tensor, size: int) -> list[Tensor]:
    """Return the rows of each rank, as `torch.chunk` cuts them: the last ones may have fewer, or none."""
    rows = -(-len(whole) // size)
    return [whole[rows * rank : rows * (rank + 1)] for rank in range(size)]
