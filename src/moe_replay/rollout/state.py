"""Whether an engine may sample: it is awake, and its weights are those of one version, whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_replay.errors import EngineError


class EngineState:
    """The weight version of an engine, and what keeps it from sampling."""

    def __init__(self, engine: str, weight_version: int) -> None:
        self.engine = engine
        self.weight_version = weight_version
        self.whole = True
        self.asleep = False

    def require_ready(self) -> None:
        """Raise unless the engine may sample."""
        if not self.whole:
            raise EngineError(
                f"{self.engine} holds weights of an update that did not succeed",
                expected=f"the weights of one version (the last was {self.weight_version})",
                remedy="Repeat update_weights with all weights",
            )
        if self.asleep:
            raise EngineError(f"{self.engine} sleeps", remedy="Call wake() before sampling")

    @contextmanager
    def update_to(self, version: int) -> Iterator[None]:
        """Weights are replaced inside; only if that ends well are they those of `version`."""
        self.begin_update()
        yield
        self.end_update(version)

    def begin_update(self) -> None:
        """From here on the weights are of no version."""
        self.whole = False

    def end_update(self, version: int) -> None:
        """All weights are those of `version`."""
        self.weight_version, self.whole = version, True
