"""Resumable state of one Megatron-Core rank, as regions of checkpoint tensors.

The layout of a parameter in memory depends on the parallel sizes (fused projections, gate and up of a shard, all
experts of a rank in one parameter, flat ranges of a distributed optimizer); checkpoint tensors do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_replay.megatron.lora import WeightAdapter
from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.family import Family
from moe_replay.megatron.weights.loading import WeightMap
from moe_replay.megatron.weights.local_shards import LocalModel, ParameterSpec
from moe_replay.megatron.weights.tensor_slices import Slices, TensorSlice
from moe_replay.train.backends.rank_state import STEP, Optimized, RankState, SavedStateError
from moe_replay.train.backends.regions import Region, RegionMap, Shape, TensorRegion, boxes, inside, overlap


class Part(NamedTuple):
    """A region of a checkpoint tensor, and of a run of memory.

    swapped   whether the last two dimensions of the tensor are those of the memory in reverse
    """

    name: str
    shape: Shape
    region: Region
    target: Region
    swapped: bool = False


class Run(NamedTuple):
    """Consecutive elements of a parameter's memory, read as a row-major tensor, and what it is made of."""

    start: int
    shape: Shape
    parts: tuple[Part, ...]


class MemoryMap(NamedTuple):
    """The `RegionMap` of a parameter, or of its elements from `first` on.

    prefix   of the names, so that weights, float32 copies and moments differ in it
    """

    prefix: str
    runs: tuple[Run, ...]
    first: int = 0

    def regions(self, values: Tensor) -> Iterator[TensorRegion]:
        flat = values.reshape(-1) if values.is_contiguous() else values.view(-1)
        for run in self.runs:
            begin, end = self.first - run.start, self.first - run.start + len(flat)
            for start, box in boxes(run.shape, max(begin, 0), min(end, math.prod(run.shape))):
                at = start - begin
                block = flat[at : at + math.prod(map(len, box))].view([len(side) for side in box])
                for part in run.parts:
                    if (common := overlap(part.target, box)) is not None:
                        yield self._tensor_region(part, common, block[inside(common, box)])

    def _tensor_region(self, part: Part, common: Region, values: Tensor) -> TensorRegion:
        offsets = list(inside(common, part.target))
        if part.swapped:
            values = values.transpose(-2, -1)
            offsets[-2:] = offsets[:-3:-1]
        lead = len(part.region) - len(offsets)  # the expert, which the parameter of one expert has no dimension for
        cut = (source[offset] for source, offset in zip(part.region[lead:], offsets, strict=True))
        values = values[(None,) * lead]
        return TensorRegion(f"{self.prefix}{part.name}", part.shape, (*part.region[:lead], *cut), values)


def runs_of_parameters(
    local: LocalModel, weight_map: WeightMap, owners: Sequence[Tensor], adapters: Mapping[ParameterSpec, WeightAdapter]
) -> dict[int, tuple[Run, ...]]:
    """Return what each parameter and buffer on this rank holds, by its `id`; others are no part of a checkpoint.

    owners   parameters and buffers; several tensors of `local` may be views of one
    """
    by_storage: dict[int, list[Tensor]] = {}
    for owner in owners:
        by_storage.setdefault(owner.untyped_storage().data_ptr(), []).append(owner)
    runs: dict[int, tuple[Run, ...]] = {}
    for spec, tensor in local.parameters:
        (owner,) = [
            candidate for candidate in by_storage[tensor.untyped_storage().data_ptr()] if _contains(candidate, tensor)
        ]
        swapped = not tensor.is_contiguous()
        shape = tuple(tensor.shape[::-1]) if swapped else tuple(tensor.shape)
        parts = tuple(_part(slice_, swapped) for slice_ in weight_map.slices(local.local_shard(spec)))
        run = Run(int(tensor.storage_offset() - owner.storage_offset()), shape, parts)
        runs[id(owner)] = (*runs.get(id(owner), ()), run)
    for spec, adapter in adapters.items():
        shard = local.local_shard(spec)
        columns = shard.rank * shard.shape[1] if spec.partition_dim == 1 else 0
        for owner, run in _adapter_runs(adapter, columns, shard.full_shape[1]):
            runs[id(owner)] = (*runs.get(id(owner), ()), run)
    return runs


def _contains(owner: Tensor, view: Tensor) -> bool:
    start = view.storage_offset() - owner.storage_offset()
    return start >= 0 and start + view.numel() <= owner.numel()


def _part(slice_: TensorSlice, swapped: bool) -> Part:
    target = _region(slice_.target)
    return Part(
        slice_.name,
        slice_.tensor_shape,
        _region(slice_.source),
        target[::-1] if swapped else target,
        slice_.transposed != swapped,
    )


def _region(slices: Slices) -> Region:
    return tuple(range(slice_.start, slice_.stop, slice_.step or 1) for slice_ in slices)


def _adapter_runs(adapter: WeightAdapter, first_column: int, width: int) -> Iterator[tuple[Tensor, Run]]:
    """Yield the runs of an adapter and their parameters: `up` by the rows of each weight, `down` for each group."""
    down, up, rank = adapter.down, adapter.up, adapter.rank
    ups = [
        Part(
            f"{part.name}.lora.up",
            (slice_.tensor_shape[0], rank),
            (*_region(slice_.source[:1]), range(rank)),
            (*_region(slice_.target[:1]), range(rank)),
        )
        for part in adapter.parts
        for slice_ in part.slices
    ]
    names = {part.group: part.name for part in reversed(adapter.parts)}  # the first of a group names it
    columns = range(first_column, first_column + down.shape[1])
    downs = [
        Part(
            f"{name}.lora.down",
            (rank, width),
            (range(rank), columns),
            (range(group * rank, (group + 1) * rank), range(down.shape[1])),
        )
        for group, name in names.items()
    ]
    number = adapter.expert or 0  # of an expert in the parameter of all of a rank
    yield adapter.layer.down, Run(number * down.numel(), tuple(down.shape), tuple(downs))
    yield adapter.layer.up, Run(number * up.numel(), tuple(up.shape), tuple(ups))


class Stepped(NamedTuple):
    """The part of a model parameter that an optimizer of Megatron-Core steps: its elements from `first` on."""

    parameter: Tensor
    first: int


def stepped_parameters(optimizer: Any) -> dict[int, Stepped]:
    """Return the model parameter of each tensor that an optimizer steps, by the `id` of the tensor."""
    stepped: dict[int, Stepped] = {}
    for inner in optimizer.chained_optimizers:
        if inner.optimizer is None:
            continue
        if hasattr(inner, "shard_fp32_groups"):  # the distributed optimizer: flat ranges
            for models, shards in (
                (inner.model_fp32_groups, inner.shard_fp32_groups),
                (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
            ):
                for model, shard in _pairs(models, shards):
                    stepped[id(shard)] = Stepped(model, inner._get_model_param_range_map(model)["param"].start)
            continue
        for model, copied in _pairs(
            getattr(inner, "float16_groups", ()), getattr(inner, "fp32_from_float16_groups", ())
        ):
            stepped[id(copied)] = Stepped(model, 0)
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                stepped.setdefault(id(parameter), Stepped(parameter, 0))
    return stepped


def _pairs(models: Sequence[Sequence[Tensor]], stepped: Sequence[Sequence[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    for ones, others in zip(models, stepped, strict=True):
        yield from zip(ones, others, strict=True)


_MOMENTS = 2  # of Adam, in float32


class MegatronState(RankState):
    """The chunks of the model on this rank and its part of the optimizer. Made by all ranks.

    layout     see `RankState`
    like       the checkpoint that the model was loaded from, by whose tensors everything is stored
    adapters   of the parameters on this rank
    """

    def __init__(
        self,
        models: list[nn.Module],
        optimizer: Any,
        layout: Mapping[str, Any],
        like: Checkpoint,
        family: Family,
        adapters: Mapping[ParameterSpec, WeightAdapter] | None = None,
        *,
        moments: bool = True,
    ) -> None:
        super().__init__({"kind": "megatron", **layout}, moments=moments)
        self._scalers = [
            inner.grad_scaler for inner in optimizer.chained_optimizers if getattr(inner, "grad_scaler", None)
        ]
        self._inner = [inner.optimizer for inner in optimizer.chained_optimizers if inner.optimizer is not None]
        self._models = models
        local = LocalModel.of(models)
        named = [entry for model in models for entry in (*model.named_parameters(), *model.named_buffers())]
        owners = {id(tensor): tensor for _, tensor in named}.values()
        self._runs = runs_of_parameters(local, WeightMap.of(family, like, local), list(owners), adapters or {})
        self._stepped = stepped_parameters(optimizer)
        self.divide()

    def weights(self) -> Iterator[tuple[Tensor, RegionMap]]:
        """Yield trained parameters and buffers, and the float32 copies of parameters in half precision.

        Frozen parameters come from `model.path`.
        """
        storages = set()
        for _, tensor in self._model_tensors():
            storages.add(tensor.untyped_storage().data_ptr())
            if id(tensor) in self._runs:
                yield tensor, MemoryMap("model.", self._runs[id(tensor)])
        for parameter, *_ in self.optimized():
            if parameter.untyped_storage().data_ptr() not in storages:  # else the optimizer steps the weight itself
                yield parameter, self._map("copy.", parameter)

    def local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that no checkpoint of the model has: counts of tokens, tables of rotary embeddings."""
        for name, tensor in self._model_tensors():
            if id(tensor) not in self._runs:
                yield name, tensor

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, model in enumerate(self._models):
            trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
            for name, tensor in [*trained, *model.named_buffers()]:
                yield f"{number}.{name}", tensor

    def optimized(self) -> Iterator[Optimized]:
        for inner in self._inner:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield Optimized(parameter, inner.state[parameter], self._map("optimizer.", parameter))

    def _map(self, prefix: str, parameter: Tensor) -> MemoryMap:
        model, first = self._stepped[id(parameter)]
        return MemoryMap(prefix, self._runs[id(model)], first)

    def bytes_of_all_ranks(self) -> int:
        """Return how much `save` writes once there are moments. All ranks call it."""
        device = next(self._models[0].parameters()).device
        kept = _MOMENTS if self.saves_moments else 0
        stepped = [(parameter, mapping) for parameter, _, mapping in self.optimized()]
        moments = sum(kept * 4 * parameter.numel() for parameter, mapping in stepped if self.writes(parameter, mapping))
        weights = [tensor for tensor, mapping in self.weights() if self.writes(tensor, mapping)]
        kept_tensors = [*weights, *(tensor for _, tensor in self.local())]
        local = moments + sum(tensor.nbytes for tensor in kept_tensors)
        total = torch.tensor([local], dtype=torch.int64, device=device)
        dist.all_reduce(total)
        return int(total)

    def numbers(self) -> dict[str, int | float]:
        """Return the step counts of parameter groups that have one, and the loss scales."""
        steps = {
            f"{STEP}{number}.{index}": int(group["step"])
            for number, inner in enumerate(self._inner)
            for index, group in enumerate(inner.param_groups)
            if "step" in group
        }
        scalers = {
            f"scaler.{number}.{name}": float(value)
            for number, scaler in enumerate(self._scalers)
            for name, value in scaler.state_dict().items()
        }
        return {**steps, **scalers}

    def restore_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Set step counts and loss scales; those of another layout are the same in all groups and optimizers."""
        for number, inner in enumerate(self._inner):
            for index, group in enumerate(inner.param_groups):
                group.pop("step", None)
                step = _number(numbers, STEP, f"{number}.{index}")
                if step is not None:
                    group["step"] = int(step)
        for number, scaler in enumerate(self._scalers):
            now = scaler.state_dict()
            values = {name: _number(numbers, "scaler.", f"{number}.{name}", f".{name}") for name in now}
            saved = {name: value for name, value in values.items() if value is not None}
            if missing := sorted(now.keys() - saved.keys()):
                raise SavedStateError("the saved state is of another optimizer", expected=missing[0])
            scaler.load_state_dict(
                {
                    name: torch.full_like(value, saved[name]) if torch.is_tensor(value) else int(saved[name])
                    for name, value in now.items()
                }
            )


def _number(numbers: Mapping[str, Any], prefix: str, name: str, suffix: str = "") -> float | None:
    """Return a number by its name, or the one value that all numbers of its kind have."""
    if prefix + name in numbers:
        return numbers[prefix + name]
    values = {value for key, value in numbers.items() if key.startswith(prefix) and key.endswith(suffix)}
    if len(values) > 1:
        raise SavedStateError(f"the saved {prefix}{name} is not known", expected="one value", found=sorted(values))
    return next(iter(values), None)
