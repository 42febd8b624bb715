"""Whether an engine may sample: it is awake, and all of its weights are of one version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_replay.errors import EngineError


class EngineState:
    """The weight version of an engine, and whether it is ready to sample."""

    def __init__(self, engine: str, weight_version: int) -> None:
        self.engine = engine
        self.weight_version = weight_version
        self.weights_id = ""
        self.weights_complete = True
        self.asleep = False

    def require_ready(self) -> None:
        """Raise unless the engine may sample."""
        if not self.weights_complete:
            raise EngineError(
                f"{self.engine} has weights of an update that did not succeed",
                expected=f"weights of one version (the last was {self.weight_version})",
                remedy="Repeat update_weights with all weights",
            )
        if self.asleep:
            raise EngineError(f"{self.engine} is asleep", remedy="Call wake() before sampling")

    @contextmanager
    def update_to(self, version: int, weights_id: str = "") -> Iterator[None]:
        """Replace the weights in this block; they are those of `version` only if it succeeds."""
        self.begin_update()
        yield
        self.end_update(version, weights_id)

    def begin_update(self) -> None:
        """Mark the weights as incomplete: they are of no version until `end_update`."""
        self.weights_complete = False

    def end_update(self, version: int, weights_id: str = "") -> None:
        """Mark all weights as those of `version`, from the update `weights_id`."""
        self.weight_version, self.weights_id, self.weights_complete = version, weights_id, True
