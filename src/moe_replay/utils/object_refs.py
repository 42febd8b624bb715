"""`ObjectRefs`: references of Ray to the parts of a batch, for processes that did not put them.

In a module of its own, so that the actor's process imports nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ObjectRefs:
    """References to the objects of one batch at a time, in sections; runs as an actor of Ray."""

    def __init__(self) -> None:
        self._number = 0
        self._sections: Sequence[Sequence[Any]] = ()

    def keep(self, number: int, sections: Sequence[Sequence[Any]]) -> None:
        """Keep the references of a batch, and no longer those of the one before."""
        self._number, self._sections = number, sections

    def take(self, number: int, section: int, numbers: Sequence[int]) -> list[Any] | None:
        """Return some references of a section; None if the batch is not kept."""
        if number != self._number or not self._sections:
            return None
        return [self._sections[section][one] for one in numbers]
