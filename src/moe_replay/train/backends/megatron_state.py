"""What one rank of a Megatron-Core run needs to resume bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_replay.train.backends.rank_state import STEP, RankState

_MOMENTS = 2  # of Adam, in float32


class MegatronState(RankState):
    """The chunks of the model on this rank and its part of the optimizer.

    layout   must be equal where a state is saved and where it is loaded
    """

    def __init__(
        self, models: list[nn.Module], optimizer: Any, layout: Mapping[str, Any], *, moments: bool = True
    ) -> None:
        super().__init__(layout, moments=moments)
        self._scalers = [one.grad_scaler for one in optimizer.chained_optimizers if getattr(one, "grad_scaler", None)]
        self._inner = [one.optimizer for one in optimizer.chained_optimizers if one.optimizer is not None]
        self._models = models

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield trained parameters and buffers, and the float32 copies of parameters in half precision.

        Frozen parameters come from `model.path`.
        """
        yield from self._model_tensors()
        storages = {tensor.untyped_storage().data_ptr() for _, tensor in self._model_tensors()}
        for name, parameter, _ in self.optimized():
            if parameter.untyped_storage().data_ptr() not in storages:  # else the optimizer steps the weight itself
                yield f"{name}.copy", parameter

    def _model_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for number, model in enumerate(self._models):
            trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
            for name, tensor in [*trained, *model.named_buffers()]:
                yield f"model.{number}.{name}", tensor

    def optimized(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield each tensor that the optimizer steps, with the optimizer's state for it."""
        for number, inner in enumerate(self._inner):
            for place, group in enumerate(inner.param_groups):
                for index, parameter in enumerate(group["params"]):
                    yield f"optimizer.{number}.{place}.{index}", parameter, inner.state[parameter]

    def bytes_of_all_ranks(self) -> int:
        """Return how much `save` writes once there are moments. All ranks call it."""
        device = next(self._models[0].parameters()).device
        kept = _MOMENTS if self.saves_moments else 0
        moments = sum(kept * 4 * parameter.numel() for _, parameter, _ in self.optimized())
        local = moments + sum(tensor.nbytes for _, tensor in self.weights())
        total = torch.tensor([local], dtype=torch.int64, device=device)
        dist.all_reduce(total)
        return int(total)

    def numbers(self) -> dict[str, int | float]:
        """Return the step counts of parameter groups that have one, and the loss scales."""
        steps = {
            f"{STEP}{number}.{place}": int(group["step"])
            for number, inner in enumerate(self._inner)
            for place, group in enumerate(inner.param_groups)
            if "step" in group
        }
        scalers = {
            f"scaler.{number}.{name}": float(value)
            for number, scaler in enumerate(self._scalers)
            for name, value in scaler.state_dict().items()
        }
        return {**steps, **scalers}

    def restore_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Set step counts and loss scales."""
        for number, inner in enumerate(self._inner):
            for place, group in enumerate(inner.param_groups):
                group.pop("step", None)
                if f"{STEP}{number}.{place}" in numbers:
                    group["step"] = numbers[f"{STEP}{number}.{place}"]
        for number, scaler in enumerate(self._scalers):
            now = scaler.state_dict()
            saved = {name: numbers[f"scaler.{number}.{name}"] for name in now}
            scaler.load_state_dict(
                {
                    name: torch.full_like(value, saved[name]) if torch.is_tensor(value) else int(saved[name])
                    for name, value in now.items()
                }
            )
