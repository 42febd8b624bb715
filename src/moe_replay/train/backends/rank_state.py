"""The part of the policy that one rank holds, in a file of its own: safetensors and JSON, never pickled objects.

layout.json               how the ranks share the model; another layout cannot read the files
rank-00003.safetensors    of that rank: weights, float32 copies of them, moments; plain numbers in the header
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_replay.errors import MoeReplayError
from moe_replay.utils.files import apply_umask

LAYOUT = "layout.json"
STEP = "step."
"""Beginning of the names of numbers that count steps of the optimizer."""
PICKLED = ".metadata"
"""What torch.distributed.checkpoint leaves in a folder; reading it would run whatever code it names."""


class SavedStateError(MoeReplayError):
    """A saved state that this run cannot resume from."""


class RankState(ABC):
    """The weights and the optimizer state of this rank, by name.

    layout    must be equal where a state is saved and where it is loaded
    moments   whether `save` writes the optimizer's state; `load` takes both kinds of files
    """

    def __init__(self, layout: Mapping[str, Any], *, moments: bool = True) -> None:
        self.saves_moments = moments
        self._layout = json.loads(json.dumps({"world_size": dist.get_world_size(), **layout}))

    # ---- what a backend provides --------------------------------------------------------------------------------

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that is saved and later restored in place, float32 copies of weights included."""

    @abstractmethod
    def optimized(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield each tensor that the optimizer steps, with the optimizer's state for it."""

    def numbers(self) -> dict[str, int | float]:
        """Return what is not a tensor, e.g. loss scales."""
        return {}

    def restore_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Set what `numbers` returned when the state was saved."""
        if numbers:
            raise SavedStateError("the saved state is of another optimizer", found=sorted(numbers)[0])

    # ---- save ---------------------------------------------------------------------------------------------------

    def save(self, folder: Path, content_of: Callable[[Tensor], Tensor] | None = None) -> None:
        """Write the file of this rank. All ranks call it.

        content_of   returns the values of this rank's part of a tensor whose memory may be elsewhere
        """
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            (folder / LAYOUT).write_text(json.dumps(self._layout, indent=2) + "\n")
        tensors = dict(self.weights())
        numbers = self.numbers()
        if self.saves_moments:
            for name, _, moments in self.optimized():
                tensors |= {f"{name}.{key}": value for key, value in moments.items()}
        else:  # moments that start anew are corrected as those of the first step
            numbers = {name: value for name, value in numbers.items() if not name.startswith(STEP)}
        # Parameters may be views of one buffer, which a safetensors file cannot express.
        read = content_of or _local
        copies = {name: read(tensor).detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        save_file(copies, _file(folder), metadata={"numbers": json.dumps(numbers)})
        apply_umask(_file(folder))
        dist.barrier()  # no rank reads before every file is written

    # ---- load ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore everything from the file of this rank. All ranks call it; another layout is refused on all.

        A file without the optimizer's state leaves an optimizer that has not made a step.
        """
        from safetensors import safe_open

        self._check_layout(folder)
        with safe_open(_file(folder), framework="pt") as file:
            numbers: dict[str, Any] = json.loads(file.metadata()["numbers"])
            remaining = set(file.offset_keys())
            weights = {name: _local(tensor) for name, tensor in self.weights()}
            if missing := sorted(weights.keys() - remaining):
                raise SavedStateError("the saved state is of another model", expected=missing[0], found=_file(folder))
            for name, tensor in weights.items():
                saved = file.get_tensor(name)
                if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                    raise SavedStateError(
                        f"the saved {name} does not fit",
                        expected=f"{tuple(tensor.shape)} {tensor.dtype}",
                        found=f"{tuple(saved.shape)} {saved.dtype}",
                    )
                tensor.copy_(saved)
            remaining -= weights.keys()
            saved_by_owner: dict[str, list[str]] = {}
            for key in sorted(remaining):
                saved_by_owner.setdefault(key.rpartition(".")[0], []).append(key)
            for name, parameter, moments in self.optimized():
                keys = saved_by_owner.pop(name, [])
                moments.clear()
                for key in keys:
                    kind = key.rpartition(".")[2]
                    saved = file.get_tensor(key)
                    moments[kind] = saved.clone() if kind == "step" else _sharded_like(parameter, saved)
                remaining.difference_update(keys)
        if remaining:
            raise SavedStateError("the saved state is of another optimizer", found=sorted(remaining)[0])
        self.restore_numbers(numbers)

    def _check_layout(self, folder: Path) -> None:
        path = folder / LAYOUT
        if (folder / PICKLED).exists():
            raise SavedStateError(
                f"{folder} holds pickled files, which are never read",
                expected="safetensors files and " + LAYOUT,
                found=PICKLED,
                remedy="An earlier version wrote it: start a new run whose model.path is the hf folder next to it",
            )
        if not path.is_file():
            raise SavedStateError("no saved state of this backend", expected=LAYOUT, found=folder)
        saved = json.loads(path.read_text())
        if saved != self._layout:
            names = sorted(name for name in {*saved, *self._layout} if saved.get(name) != self._layout.get(name))
            raise SavedStateError(
                "the state was saved by ranks that shared the model in another way",
                expected=", ".join(f"{name} {self._layout.get(name)}" for name in names),
                found=", ".join(f"{name} {saved.get(name)}" for name in names),
                remedy="Resume with the sizes it was saved with, or start a new run from its exported weights",
            )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    local = local.to(parameter.device, copy=True)  # in memory of its own, not the file's
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _file(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank():05d}.safetensors"
