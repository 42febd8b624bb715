"""What one rank of a Megatron-Core run needs to resume bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_replay.megatron.lora import LoraAdapter
from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.family import Family
from moe_replay.megatron.weights.local_shards import LocalModel, ParameterSpec
from moe_replay.megatron.weights.transfer import WeightMap
from moe_replay.train.backends.megatron_regions import MemoryMap, runs_of_parameters, stepped_parameters
from moe_replay.train.backends.rank_state import STEP, Optimized, RankState, SavedStateError
from moe_replay.train.backends.regions import RegionMap

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
        adapters: Mapping[ParameterSpec, LoraAdapter] | None = None,
        *,
        moments: bool = True,
    ) -> None:
        super().__init__({"kind": "megatron", **layout}, moments=moments)
        self._scalers = [one.grad_scaler for one in optimizer.chained_optimizers if getattr(one, "grad_scaler", None)]
        self._inner = [one.optimizer for one in optimizer.chained_optimizers if one.optimizer is not None]
        self._models = models
        local = LocalModel.of(models)
        named = [one for model in models for one in (*model.named_parameters(), *model.named_buffers())]
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
        for parameter in self._optimizer_tensors():
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
        """Yield each tensor that the optimizer steps, with the optimizer's state for it."""
        for inner in self._inner:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield Optimized(parameter, inner.state[parameter], self._map("optimizer.", parameter))

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        return (parameter for inner in self._inner for group in inner.param_groups for parameter in group["params"])

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
        """Set step counts and loss scales; those of another layout are alike in all groups and optimizers."""
        for number, inner in enumerate(self._inner):
            for index, group in enumerate(inner.param_groups):
                group.pop("step", None)
                step = _number(numbers, STEP, f"{number}.{index}")
                if step is not None:
                    group["step"] = int(step)
        for number, scaler in enumerate(self._scalers):
            now = scaler.state_dict()
            found = {name: _number(numbers, "scaler.", f"{number}.{name}", f".{name}") for name in now}
            saved = {name: value for name, value in found.items() if value is not None}
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
