"""Regions of tensors of the whole model: which part of a tensor a rank holds, and what two layouts have in common.

A region has one `range` for each dimension of the whole tensor. In a file it is part of the name of what is stored,
with the size of the whole tensor: `model.norm.weight[0:16/32]`, `...gate_up_proj[3:4/8,0:64:2/64,0:32/32]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

Shape = tuple[int, ...]
Region = tuple[range, ...]

_KEY = re.compile(r"(.+)\[([0-9:/,]+)\]")
_RANGE = re.compile(r"(\d+):(\d+)(?::(\d+))?/(\d+)")


class TensorRegion(NamedTuple):
    """A part of a tensor of the whole model.

    name     of the whole tensor, the same in every layout
    shape    of the whole tensor
    region   of the whole tensor
    values   of the region, in its shape: a view of memory of this rank
    """

    name: str
    shape: Shape
    region: Region
    values: Tensor


class RegionMap(Protocol):
    """Maps the memory of one tensor on this rank to regions of tensors of the whole model."""

    def regions(self, values: Tensor) -> Iterator[TensorRegion]:
        """Yield what the values on this rank are in the whole model."""


class Rows(NamedTuple):
    """Consecutive rows of one tensor, or all of it: a `RegionMap`."""

    name: str
    shape: Shape
    first: int = 0

    def regions(self, values: Tensor) -> Iterator[TensorRegion]:
        _, *rest = values.shape if values.dim() else (0,)
        rows = [range(self.first, self.first + len(values))] if values.dim() else []
        yield TensorRegion(self.name, self.shape, (*rows, *map(range, rest)), values)


def key(name: str, shape: Shape, region: Region) -> str:
    sizes = ((_plain(rows), size) for rows, size in zip(region, shape, strict=True))
    return f"{name}[{','.join(f'{rows}/{size}' for rows, size in sizes)}]" if shape else name


def parse(stored: str) -> tuple[str, Shape, Region]:
    """Return name, shape of the whole tensor and region of what is stored under a name; without a region: a scalar."""
    match = _KEY.fullmatch(stored)
    ranges = [] if match is None else [_RANGE.fullmatch(rows) for rows in match[2].split(",")]
    numbers = [[int(number or 1) for number in rows.groups()] for rows in ranges if rows is not None]
    if match is None or len(numbers) < len(ranges):
        return stored, (), ()
    region = tuple(range(start, stop, step) for start, stop, step, _ in numbers)
    return match[1], tuple(size for *_, size in numbers), region


def _plain(rows: range) -> str:
    return f"{rows.start}:{rows.stop}" if rows.step == 1 else f"{rows.start}:{rows.stop}:{rows.step}"


def numel(region: Region) -> int:
    return math.prod(map(len, region))


def overlap(first: Region, second: Region) -> Region | None:
    """Return what two regions have in common; None if that is nothing. Ranges of one dimension have the same step."""
    common = tuple(_common(a, b) for a, b in zip(first, second, strict=True))
    return common if all(map(len, common)) else None


def _common(first: range, second: range) -> range:
    if first.step != second.step:
        raise ValueError(f"regions with different steps: {first} and {second}")
    if (first.start - second.start) % first.step:
        return range(0)
    return range(
        max(first.start, second.start), min(first[len(first) :].start, second[len(second) :].start), first.step
    )


def without(region: Region, taken: Region) -> list[Region]:
    """Return what is left of a region when a part of it has been taken."""
    left, inner = [], list(region)
    for dim, (whole, part) in enumerate(zip(region, taken, strict=True)):
        first = whole.index(part[0])
        for rest in (whole[:first], whole[first + len(part) :]):
            if rest:
                left.append((*inner[:dim], rest, *inner[dim + 1 :]))
        inner[dim] = part
    return left


def inside(part: Region, whole: Region) -> tuple[slice, ...]:
    """Return where a part of a region lies in a tensor that holds the region."""
    firsts = [whole_rows.index(part_rows[0]) for part_rows, whole_rows in zip(part, whole, strict=True)]
    return tuple(slice(first, first + len(part_rows)) for first, part_rows in zip(firsts, part, strict=True))


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[int, Region]]:
    """Yield the elements [first, last) of a row-major tensor as few regions, each with its own first element."""
    if first >= last:
        return
    if len(shape) < 2:
        yield first, (range(first, last),) if shape else ()
        return
    width = math.prod(shape[1:])
    (row, begin), (last_row, end) = divmod(first, width), divmod(last, width)
    if row == last_row:
        yield from _in_row(shape, row, begin, end)
        return
    if begin:
        yield from _in_row(shape, row, begin, width)
        row += 1
    if row < last_row:
        yield row * width, (range(row, last_row), *map(range, shape[1:]))
    yield from _in_row(shape, last_row, 0, end)


def _in_row(shape: Sequence[int], row: int, first: int, last: int) -> Iterator[tuple[int, Region]]:
    start = row * math.prod(shape[1:])
    for offset, region in boxes(shape[1:], first, last):
        yield start + offset, (range(row, row + 1), *region)
