"""The files that ranks have saved, read by ranks that may share the model in another way.

Names and regions of what is stored come from the headers; of the values a rank reads only those that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from moe_replay.errors import MoeReplayError
from moe_replay.train.backends import regions
from moe_replay.train.backends.regions import Region, RegionMap, Shape, TensorRegion


class SavedStateError(MoeReplayError):
    """A saved state that this run cannot resume from."""


class SavedFiles:
    """The safetensors files of a folder, opened when they are needed.

    first   number of the file that is read before all others
    then    numbers of those that are likely to have the rest
    """

    def __init__(self, folder: Path, first: int, then: Sequence[int] = ()) -> None:
        found = sorted(folder.glob("rank-*.safetensors"))
        if not found:
            raise SavedStateError("no saved state", expected="rank-*.safetensors", found=folder)
        self._paths = found
        self._first = first if first < len(found) else 0
        after = [(self._first + number) % len(found) for number in range(len(found))]
        self._order = list(dict.fromkeys([self._first, *(number for number in then if number < len(found)), *after]))
        self._open: dict[int, Any] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._resources.close()

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
            self._open[number] = self._resources.enter_context(opened)
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


class _Wanted:
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
        self.wanted: list[_Wanted] = []

    @property
    def is_complete(self) -> bool:
        return bool(self.tensors) and not any(one.missing for one in self.wanted)


class Reading:
    """Reads that a rank needs from the files: first all of it is found, then it is read."""

    def __init__(self) -> None:
        self._wanted: dict[str, list[_Wanted]] = {}
        self._states: dict[int, _State] = {}
        self._owners: dict[str, list[_State]] = {}
        self._copies: list[_Copy] = []

    def want(self, part: TensorRegion) -> None:
        """Fill the values of a region."""
        self._wanted.setdefault(part.name, []).append(_Wanted(part))

    def want_state(self, mapping: RegionMap, like: Tensor) -> None:
        """Find the optimizer's state for a tensor of this rank, whatever that consists of."""
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
        incomplete = [one for state in self._states.values() if state.tensors for one in state.wanted]
        for one in [*(one for several in self._wanted.values() for one in several), *incomplete]:
            if one.missing:
                raise SavedStateError(
                    "the saved state is of another model",
                    expected=regions.key(one.part.name, one.part.shape, one.missing[0]),
                    found="no file that has it",
                )

    def run(self) -> None:
        """Read and copy what was found."""
        for file, stored, source, target in self._copies:
            values = file.get_slice(stored)[source] if source else file.get_tensor(stored)
            target.copy_(values)

    def _is_complete(self) -> bool:
        weights = (one for several in self._wanted.values() for one in several)
        return not any(one.missing for one in weights) and all(one.is_complete for one in self._states.values())

    def _use(self, file: Any, stored: str) -> None:
        name, shape, region = regions.parse(stored)
        for one in self._wanted.get(name, ()):
            self._take(file, stored, one, shape, region)
        owner, _, kind = name.rpartition(".")
        for state in self._owners.get(owner, ()):
            if not shape and state.like.dim():
                state.tensors.setdefault(kind, file.get_tensor(stored).clone())
                continue
            if kind not in state.tensors:
                dtype = file.get_slice(stored)[tuple(slice(0, 0) for _ in shape)].dtype if shape else torch.float32
                state.tensors[kind] = torch.zeros_like(state.like, dtype=dtype, requires_grad=False)
                state.wanted += [
                    _Wanted(part._replace(name=f"{part.name}.{kind}"))
                    for part in state.mapping.regions(state.tensors[kind])
                ]
            for one in state.wanted:
                if one.part.name == name:
                    self._take(file, stored, one, shape, region)

    def _take(self, file: Any, stored: str, one: _Wanted, shape: Shape, region: Region) -> None:
        """Note what of a wanted region a stored one has that was not found before."""
        part, left = one.part, list[Region]()
        for missing in one.missing:
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
        one.missing = left
