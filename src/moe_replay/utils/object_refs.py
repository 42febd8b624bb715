"""`ObjectRefs`: references of Ray to the parts of a batch, for processes that did not put them.

A separate module, so that the actor's process imports nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple


class Part(NamedTuple):
    """An object with some trajectories of a batch.

    start   index of the first of them
    ref     Ray's reference to it
    """

    start: int
    ref: Any


def part_with(number: int, parts: Sequence[Part]) -> int:
    """Return which of some parts, in order, has a trajectory that is in one of them."""
    return bisect_right(parts, number, key=lambda part: part.start) - 1


class ObjectRefs:
    """References to the objects of one batch at a time, in sections; runs as an actor of Ray."""

    def __init__(self) -> None:
        self._number = 0
        self._sections: Sequence[Sequence[Part]] = ()

    def keep(self, number: int, sections: Sequence[Sequence[Part]]) -> None:
        """Keep the references of a batch, and no longer those of the one before."""
        self._number, self._sections = number, sections

    def take(self, number: int, section: int, numbers: Sequence[int]) -> list[Part] | None:
        """Return the parts of a section that have these trajectories, in order; None if the batch is not kept."""
        if number != self._number or not self._sections:
            return None
        parts = self._sections[section]
        return [parts[index] for index in sorted({part_with(number, parts) for number in numbers})]
