"""What one rank of a Megatron-Core run needs to go on bit for bit: a safetensors file for each rank, and their layout.

layout.json               how the ranks share the model; another layout cannot read the files
rank-00003.safetensors    of that rank: weights, float32 copies of them, moments; numbers in the header
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_replay.errors import MoeReplayError

LAYOUT = "layout.json"
_MOMENTS = 2  # of Adam, in float32


class SavedStateError(MoeReplayError):
    """A saved state that this run cannot go on from."""


class RankState:
    """The weights and the optimizer of this rank, by name.

    layout   what must be equal where a state is saved and where it is loaded
    """

    def __init__(self, models: list[nn.Module], optimizer: Any, layout: Mapping[str, Any]) -> None:
        self._layout = json.loads(json.dumps({"world_size": dist.get_world_size(), **layout}))
        self._scalers = [one.grad_scaler for one in optimizer.chained_optimizers if getattr(one, "grad_scaler", None)]
        self._inner = [one.optimizer for one in optimizer.chained_optimizers if one.optimizer is not None]
        self._models = models

    # ---- what there is ------------------------------------------------------------------------------------------

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for number, model in enumerate(self._models):
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                yield f"model.{number}.{name}", tensor

    def _optimized(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Each tensor that the optimizer steps, with its moments."""
        for number, inner in enumerate(self._inner):
            for place, group in enumerate(inner.param_groups):
                for index, parameter in enumerate(group["params"]):
                    yield f"optimizer.{number}.{place}.{index}", parameter, inner.state[parameter]

    def _copies(self) -> Iterator[tuple[str, Tensor]]:
        """Float32 copies of weights in half precision; what steps the weights themselves has none."""
        weights = {tensor.untyped_storage().data_ptr() for _, tensor in self._weights()}
        for name, parameter, _ in self._optimized():
            if parameter.untyped_storage().data_ptr() not in weights:
                yield f"{name}.copy", parameter

    def bytes_of_all_ranks(self) -> int:
        """How much `save` writes once there are moments. All ranks call it."""
        device = next(self._models[0].parameters()).device
        moments = sum(_MOMENTS * 4 * parameter.numel() for _, parameter, _ in self._optimized())
        mine = moments + sum(tensor.nbytes for _, tensor in [*self._weights(), *self._copies()])
        total = torch.tensor([mine], dtype=torch.int64, device=device)
        dist.all_reduce(total)
        return int(total)

    def _numbers(self) -> dict[str, int | float]:
        """What is no tensor: counts of steps where a group has one for all, and loss scales."""
        steps = {
            f"step.{number}.{place}": int(group["step"])
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

    # ---- out ----------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the file of this rank. All ranks call it."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            (folder / LAYOUT).write_text(json.dumps(self._layout, indent=2) + "\n")
        tensors = dict([*self._weights(), *self._copies()])
        for name, _, moments in self._optimized():
            tensors |= {f"{name}.{key}": value for key, value in moments.items()}
        # Parameters may be parts of one buffer, which a file cannot tell.
        apart = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        save_file(apart, _file(folder), metadata={"numbers": json.dumps(self._numbers())})
        dist.barrier()  # nobody reads before it is written

    # ---- in -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take everything from the file of this rank. All ranks call it; another layout is refused on all."""
        from safetensors import safe_open

        self._check_layout(folder)
        with safe_open(_file(folder), framework="pt") as file:
            numbers: dict[str, Any] = json.loads(file.metadata()["numbers"])
            waiting = set(file.offset_keys())
            held = dict([*self._weights(), *self._copies()])
            if missing := sorted(held.keys() - waiting):
                raise SavedStateError("the saved state is of another model", expected=missing[0], found=_file(folder))
            for name, tensor in held.items():
                saved = file.get_tensor(name)
                if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                    raise SavedStateError(
                        f"the saved {name} does not fit",
                        expected=f"{tuple(tensor.shape)} {tensor.dtype}",
                        found=f"{tuple(saved.shape)} {saved.dtype}",
                    )
                tensor.copy_(saved)
            waiting -= held.keys()
            for name, parameter, moments in self._optimized():
                keys = [other for other in waiting if other.rpartition(".")[0] == name]
                moments.clear()
                for key in keys:
                    kind = key.rpartition(".")[2]
                    saved = file.get_tensor(key)
                    moments[kind] = saved if kind == "step" else saved.to(parameter.device)
                waiting.difference_update(keys)
        if waiting:
            raise SavedStateError("the saved state is of another optimizer", found=sorted(waiting)[0])
        self._take_numbers(numbers)

    def _check_layout(self, folder: Path) -> None:
        path = folder / LAYOUT
        if not path.is_file():
            raise SavedStateError("no saved state of a Megatron-Core run", expected=LAYOUT, found=folder)
        saved = json.loads(path.read_text())
        if saved != self._layout:
            names = sorted(name for name in {*saved, *self._layout} if saved.get(name) != self._layout.get(name))
            raise SavedStateError(
                "the state was saved by ranks that shared the model in another way",
                expected=", ".join(f"{name} {self._layout.get(name)}" for name in names),
                found=", ".join(f"{name} {saved.get(name)}" for name in names),
                remedy="Resume with the sizes it was saved with, or start a new run from its exported weights",
            )

    def _take_numbers(self, numbers: Mapping[str, Any]) -> None:
        for number, inner in enumerate(self._inner):
            for place, group in enumerate(inner.param_groups):
                if f"step.{number}.{place}" in numbers:
                    group["step"] = numbers[f"step.{number}.{place}"]
        for number, scaler in enumerate(self._scalers):
            now = scaler.state_dict()
            saved = {name: numbers[f"scaler.{number}.{name}"] for name in now}
            scaler.load_state_dict(
                {
                    name: torch.full_like(value, saved[name]) if torch.is_tensor(value) else int(saved[name])
                    for name, value in now.items()
                }
            )


def _file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank():05d}.safetensors"
