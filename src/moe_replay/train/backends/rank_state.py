"""The policy state of one rank, in its own file: safetensors and JSON, never pickled objects.

layout.json               parallel layout of the ranks
rank-00003.safetensors    weights, float32 master weights and moments of that rank; plain numbers in the header

Every stored tensor is a region of a tensor of the whole model, and its name says which (regions.py). So the files can
be loaded under any parallel layout: each rank reads the regions it needs, its own file first. A region that several
ranks hold is written by one of them, if the backend divides the work (`divide`).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_replay.distributed.collectives import all_gather, control_group
from moe_replay.errors import MoeReplayError
from moe_replay.train.backends import regions
from moe_replay.train.backends.offload import local_part
from moe_replay.train.backends.regions import Region, RegionMap, Shape, TensorRegion
from moe_replay.utils.files import Write, apply_umask


def signature(keys: Iterable[str]) -> int:
    """Return a number for a part of a model, from the names of its regions."""
    digest = hashlib.blake2b("\n".join(sorted(keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def writers(signatures: Sequence[int]) -> dict[int, int]:
    """Return the rank that writes each part of this rank, by its signature. All ranks call it."""
    if dist.get_world_size() == 1:
        return dict.fromkeys(signatures, 0)
    gathered = all_gather(np.unique(np.array(signatures, np.uint64)).view(np.uint8), control_group())
    return chosen(signatures, [np.frombuffer(of_rank.tobytes(), np.uint64) for of_rank in gathered])


def chosen(signatures: Sequence[int], by_rank: Sequence[np.ndarray]) -> dict[int, int]:
    """Return the writer of each part, of the ranks that have it; parts are spread evenly over them.

    by_rank   signatures of the parts of each rank
    """
    parts = np.unique(np.array(signatures, np.uint64))
    holds = [np.isin(parts, of_rank) for of_rank in by_rank]
    index = parts % np.sum(holds, axis=0, dtype=np.uint64)  # among the ranks that have it
    writer, before = np.zeros(len(parts), np.int64), np.zeros(len(parts), np.uint64)
    for rank, has in enumerate(holds):
        writer[has & (before == index)] = rank
        before += has.astype(np.uint64)
    return dict(zip(parts.tolist(), writer.tolist(), strict=True))


class SavedStateError(MoeReplayError):
    """A saved state that this run cannot resume from."""


class SavedFiles(ExitStack):
    """The safetensors files of a folder, opened when they are needed.

    first   number of the file that is read before all others
    then    numbers of those that are likely to have the rest
    """

    def __init__(self, folder: Path, first: int, then: Sequence[int] = ()) -> None:
        super().__init__()
        paths = sorted(folder.glob("rank-*.safetensors"))
        if not paths:
            raise SavedStateError("no saved state", expected="rank-*.safetensors", found=folder)
        self._paths = paths
        self._first = first if first < len(paths) else 0
        after = [(self._first + number) % len(paths) for number in range(len(paths))]
        self._order = list(dict.fromkeys([self._first, *(number for number in then if number < len(paths)), *after]))
        self._open: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        """Yield every file, the first one first and the likely ones next."""
        yield from map(self._file, self._order)

    def _file(self, number: int) -> Any:
        from safetensors import SafetensorError, safe_open

        if number not in self._open:
            try:
                opened = safe_open(self._paths[number], framework="pt")
            except (SafetensorError, OSError) as error:
                raise SavedStateError(f"{self._paths[number]} cannot be read: {error}") from error
            self._open[number] = self.enter_context(opened)
        return self._open[number]

    def numbers(self, rank: int) -> dict[str, Any]:
        """Return what a rank saved besides tensors."""
        return json.loads(self._file(rank).metadata()["numbers"])

    def restore(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor of the first file that has the same name and shape, if there is one."""
        file = self._file(self._first)
        if name in set(file.offset_keys()):
            saved = file.get_tensor(name)
            if saved.shape == tensor.shape:
                tensor.copy_(saved)


class _Request:
    """A region that this rank needs, and what of it has been found so far."""

    def __init__(self, part: TensorRegion) -> None:
        self.part = part
        self.missing: list[Region] = [part.region] if regions.numel(part.region) else []


class _Copy(NamedTuple):
    """A part of a stored tensor and where it goes."""

    file: Any
    stored: str
    source: tuple[slice, ...]
    target: Tensor


class _State:
    """The optimizer's state for one tensor of this rank: what kinds there are is known from the files."""

    def __init__(self, mapping: RegionMap, like: Tensor) -> None:
        self.mapping, self.like = mapping, like
        self.tensors: dict[str, Tensor] = {}
        self.requests: list[_Request] = []

    @property
    def is_complete(self) -> bool:
        return bool(self.tensors) and not any(request.missing for request in self.requests)


class Reading:
    """Reads that a rank needs from the files: first all of it is found, then it is read."""

    def __init__(self) -> None:
        self._requests: dict[str, list[_Request]] = {}
        self._states: dict[int, _State] = {}
        self._owners: dict[str, list[_State]] = {}
        self._copies: list[_Copy] = []

    def want(self, part: TensorRegion) -> None:
        """Fill the values of a region."""
        self._requests.setdefault(part.name, []).append(_Request(part))

    def want_state(self, mapping: RegionMap, like: Tensor) -> None:
        """Find the optimizer's state for a tensor of this rank."""
        state = self._states[id(mapping)] = _State(mapping, like)
        for name in {part.name for part in mapping.regions(like)}:
            self._owners.setdefault(name, []).append(state)

    def state_of(self, mapping: RegionMap) -> dict[str, Tensor]:
        """Return the state that was found for a tensor, by kind."""
        return self._states[id(mapping)].tensors

    def plan(self, files: SavedFiles) -> None:
        """Look for everything, file after file; raise if something is not there or does not fit."""
        for file in files:
            for stored in file.offset_keys():
                self._use(file, stored)
            if self._is_complete():
                break
        of_states = [request for state in self._states.values() if state.tensors for request in state.requests]
        for request in [*chain.from_iterable(self._requests.values()), *of_states]:
            if request.missing:
                raise SavedStateError(
                    "the saved state is of another model",
                    expected=regions.key(request.part.name, request.part.shape, request.missing[0]),
                    found="no file that has it",
                )

    def run(self) -> None:
        for file, stored, source, target in self._copies:
            values = file.get_slice(stored)[source] if source else file.get_tensor(stored)
            target.copy_(values)

    def _is_complete(self) -> bool:
        weights = chain.from_iterable(self._requests.values())
        return not any(request.missing for request in weights) and all(
            state.is_complete for state in self._states.values()
        )

    def _use(self, file: Any, stored: str) -> None:
        name, shape, region = regions.parse(stored)
        for request in self._requests.get(name, ()):
            self._take(file, stored, request, shape, region)
        owner, _, kind = name.rpartition(".")
        for state in self._owners.get(owner, ()):
            if not shape and state.like.dim():
                state.tensors.setdefault(kind, file.get_tensor(stored).clone())
                continue
            if kind not in state.tensors:
                dtype = file.get_slice(stored)[tuple(slice(0, 0) for _ in shape)].dtype if shape else torch.float32
                state.tensors[kind] = torch.zeros_like(state.like, dtype=dtype, requires_grad=False)
                state.requests += [
                    _Request(part._replace(name=f"{part.name}.{kind}"))
                    for part in state.mapping.regions(state.tensors[kind])
                ]
            for request in state.requests:
                if request.part.name == name:
                    self._take(file, stored, request, shape, region)

    def _take(self, file: Any, stored: str, request: _Request, shape: Shape, region: Region) -> None:
        """Take from a stored region what a request still misses."""
        part, left = request.part, list[Region]()
        for missing in request.missing:
            if shape != part.shape:
                raise SavedStateError(f"the saved {part.name} does not fit", expected=part.shape, found=shape)
            common = regions.overlap(missing, region)
            if common is None:
                left.append(missing)
                continue
            source = regions.inside(common, region)
            values = file.get_slice(stored)[tuple(slice(0, 0) for _ in source)] if source else file.get_tensor(stored)
            if values.dtype != part.values.dtype:
                raise SavedStateError(
                    f"the saved {part.name} does not fit", expected=part.values.dtype, found=values.dtype
                )
            self._copies.append(_Copy(file, stored, source, part.values[regions.inside(common, part.region)]))
            left += regions.without(missing, common)
        request.missing = left


LAYOUT = "layout.json"
STEP = "step."
"""Beginning of the names of numbers that count steps of the optimizer."""
PICKLED = ".metadata"
"""File that torch.distributed.checkpoint leaves in a folder; reading it would run any code it names."""
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
        parts = [*self.weights(), *((entry.parameter, entry.mapping) for entry in self.optimized())]
        self._writers = writers([_signature(local_part(tensor), mapping) for tensor, mapping in parts])

    def writes(self, values: Tensor, mapping: RegionMap) -> bool:
        """Return whether the file of this rank has a tensor, or the optimizer's state for it; `values` on this rank."""
        return not self._writers or self._writers[_signature(values, mapping)] == dist.get_rank()

    def stage(self, content_of: Callable[[Tensor], Tensor] | None = None) -> Write:
        """Copy everything to host memory and return what writes the file of this rank.

        content_of   returns the values of this rank's part of a tensor whose memory may be elsewhere
        """
        read = content_of or local_part
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
        else:  # fresh moments are bias-corrected from the first step
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
            for part in mapping.regions(local_part(tensor)):
                reading.want(part)
        optimized = list(self.optimized()) if saved["moments"] else []
        for parameter, _, mapping in optimized:
            reading.want_state(mapping, local_part(parameter))
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
                remedy="Another program wrote it: start a new run whose model.path is the hf folder next to it",
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
