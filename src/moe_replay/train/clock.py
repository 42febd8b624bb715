"""How long the parts of a step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Starts when it is made.

    clock = Clock()
    with clock("rollout"):
        ...
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - began

    def metrics(self, tokens: int) -> dict[str, float]:
        """Seconds of each part and of the whole step so far, and tokens for each second of it."""
        step = time.monotonic() - self._began
        parts = {f"time/{part}": seconds for part, seconds in self._parts.items()}
        return {**parts, "time/step": step, "time/tokens_per_second": tokens / max(step, 1e-9)}
