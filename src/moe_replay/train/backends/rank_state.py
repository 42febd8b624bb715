"""The part of the policy that one rank holds, in its own file: safetensors and JSON, never pickled objects.

layout.json               how the ranks shared the model
rank-00003.safetensors    of that rank: weights, float32 copies of them, moments; plain numbers in the header

Every tensor in a file is a region of a tensor of the whole model, and its name says which (regions.py). So the files
can be loaded by any number of ranks that share the model in any way: each reads what it needs, its own file first.
What several ranks hold is in the file of one of them, where a backend divides it (`divide`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_replay.train.backends import regions
from moe_replay.train.backends.regions import RegionMap
from moe_replay.train.backends.replicas import signature, writers
from moe_replay.train.backends.saved_files import Reading, SavedFiles, SavedStateError
from moe_replay.utils.files import Write, apply_umask

__all__ = ["RankState", "SavedStateError"]

LAYOUT = "layout.json"
STEP = "step."
"""Beginning of the names of numbers that count steps of the optimizer."""
PICKLED = ".metadata"
"""What torch.distributed.checkpoint leaves in a folder; reading it would run whatever code it names."""
_LOCAL = "local."
"""Beginning of the names of buffers that belong to no tensor of the whole model."""
_REQUIRED = ("kind", "dtype")


class Optimized(NamedTuple):
    """A tensor that the optimizer steps, the optimizer's state for it, and where it belongs in the whole model."""

    parameter: Tensor
    state: dict[str, Any]
    mapping: RegionMap


class RankState(ABC):
    """The weights and the optimizer state of this rank.

    layout    facts about how ranks share the model; `kind` and `dtype` must be equal where a state is loaded
    moments   whether `stage` takes the optimizer's state; `load` takes both kinds of files
    """

    def __init__(self, layout: Mapping[str, Any], *, moments: bool = True) -> None:
        self.saves_moments = moments
        self._writers: dict[int, int] = {}
        self._layout = json.loads(json.dumps({"world_size": dist.get_world_size(), **layout}))

    # ---- what a backend provides --------------------------------------------------------------------------------

    @abstractmethod
    def weights(self) -> Iterator[tuple[Tensor, RegionMap]]:
        """Yield every tensor that is saved and later restored in place, float32 copies of weights included."""

    @abstractmethod
    def optimized(self) -> Iterator[Optimized]:
        """Yield each tensor that the optimizer steps."""

    def local(self) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers that only this rank has, such as counters; other layouts do not restore them."""
        yield from ()

    def numbers(self) -> dict[str, int | float]:
        """Return what is not a tensor, e.g. loss scales."""
        return {}

    def restore_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Set what `numbers` returned, here or on a rank of another layout, when the state was saved."""
        if numbers:
            raise SavedStateError("the saved state is of another optimizer", found=sorted(numbers)[0])

    # ---- save ---------------------------------------------------------------------------------------------------

    def divide(self) -> None:
        """Have each part that several ranks hold written by one of them. All ranks call it; without it, all write."""
        parts = [*self.weights(), *((one.parameter, one.mapping) for one in self.optimized())]
        self._writers = writers([_signature(_local(tensor), mapping) for tensor, mapping in parts])

    def writes(self, values: Tensor, mapping: RegionMap) -> bool:
        """Return whether the file of this rank has a tensor, or the optimizer's state for it; `values` on this rank."""
        return not self._writers or self._writers[_signature(values, mapping)] == dist.get_rank()

    def stage(self, content_of: Callable[[Tensor], Tensor] | None = None) -> Write:
        """Copy everything to host memory and return what writes the file of this rank.

        content_of   returns the values of this rank's part of a tensor whose memory may be elsewhere
        """
        read = content_of or _local
        copies: dict[str, Tensor] = {}

        def add(tensor: Tensor, mapping: RegionMap, suffix: str = "") -> None:
            for part in mapping.regions(read(tensor).detach()):
                stored = regions.key(part.name + suffix, part.shape, part.region)
                copies[stored] = _copied(part.values)

        for tensor, mapping in self.weights():
            if self.writes(read(tensor), mapping):
                add(tensor, mapping)
        for name, tensor in self.local():
            copies[_LOCAL + name] = _copied(read(tensor))
        numbers = self.numbers()
        if self.saves_moments:
            for parameter, state, mapping in self.optimized():
                for kind, value in state.items() if self.writes(read(parameter), mapping) else ():
                    if _is_scalar(value, parameter):
                        names = {part.name for part in mapping.regions(read(parameter).detach())}
                        copies |= {f"{name}.{kind}": _copied(read(value)) for name in names}
                    else:
                        add(value, mapping, f".{kind}")
        else:  # moments that start anew are corrected as those of the first step
            numbers = {name: value for name, value in numbers.items() if not name.startswith(STEP)}
        layout = {**self._layout, "moments": self.saves_moments}
        rank = dist.get_rank()
        return lambda folder: _write(folder, rank, copies, numbers, layout)

    # ---- load ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore everything that this rank holds. All ranks call it; nothing is changed if something is missing.

        Files without the optimizer's state leave an optimizer that has not made a step.
        """
        saved = self._checked_layout(folder)
        reading = Reading()
        for tensor, mapping in self.weights():
            for part in mapping.regions(_local(tensor)):
                reading.want(part)
        optimized = list(self.optimized()) if saved["moments"] else []
        for parameter, _, mapping in optimized:
            reading.want_state(mapping, _local(parameter))
        is_same = {name: value for name, value in saved.items() if name != "moments"} == self._layout
        with SavedFiles(folder, first=dist.get_rank(), then=sorted(set(self._writers.values()))) as files:
            reading.plan(files)
            numbers = files.numbers(0 if not is_same else dist.get_rank())
            reading.run()
            if is_same:
                for name, tensor in self.local():
                    files.restore(_LOCAL + name, tensor)
        for _, state, _ in self.optimized():
            state.clear()
        for parameter, state, mapping in optimized:
            for kind, value in reading.state_of(mapping).items():
                state[kind] = value if _is_scalar(value, parameter) else _sharded_like(parameter, value)
        self.restore_numbers(numbers)

    def _checked_layout(self, folder: Path) -> dict[str, Any]:
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
        if names := [name for name in _REQUIRED if saved.get(name) != self._layout.get(name)]:
            raise SavedStateError(
                "the state was saved by another backend or in another precision",
                expected=", ".join(f"{name} {self._layout.get(name)}" for name in names),
                found=", ".join(f"{name} {saved.get(name)}" for name in names),
                remedy="Resume with what it was saved with, or start a new run from its exported weights",
            )
        return saved


def _write(
    folder: Path, rank: int, tensors: dict[str, Tensor], numbers: dict[str, Any], layout: dict[str, Any]
) -> list[Path]:
    from safetensors.torch import save_file

    written = [folder / f"rank-{rank:05d}.safetensors"]
    save_file(tensors, written[0], metadata={"numbers": json.dumps(numbers)})
    apply_umask(written[0])
    if rank == 0:
        written.append(folder / LAYOUT)
        written[1].write_text(json.dumps(layout, indent=2) + "\n")
    return written


def _copied(values: Tensor) -> Tensor:
    """Return the values in their own host memory: views of one buffer cannot be in a safetensors file."""
    return values.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _signature(tensor: Tensor, mapping: RegionMap) -> int:
    return signature(regions.key(part.name, part.shape, part.region) for part in mapping.regions(tensor.detach()))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_scalar(value: Tensor, parameter: Tensor) -> bool:
    return value.dim() == 0 < parameter.dim()


def _sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
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
