"""Wall-clock time of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Times the parts of a step; the step starts when the clock is created.

    clock = Clock()
    with clock("rollout"):
        ...
    """

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        started_at = time.monotonic()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.monotonic() - started_at

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return seconds of each part and of the whole step so far, and tokens per second of the step."""
        step = time.monotonic() - self._started_at
        parts = {f"time/{part}": seconds for part, seconds in self._parts.items()}
        return {**parts, "time/step": step, "time/tokens_per_second": tokens / max(step, 1e-9)}
