"""One server of a pool: its load, and whether it is used."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from moe_replay.errors import EngineAnswerError, EngineUnavailableError
from moe_replay.rollout.engine import Engine
from moe_replay.rollout.weights_id import CurrentWeights
from moe_replay.utils.messages import one_line

logger = logging.getLogger(__name__)


class ServedEngine(Engine, Protocol):
    """An engine behind a URL."""

    url: str

    def current_weights(self) -> CurrentWeights:
        """Return what the server says of its weights."""
        ...


class Member:
    """One engine of the pool, its load, and why and for how long it is not used after a failure.

    down_until   time at which its health is checked again: never, for one that is put aside; None: it is in use
    cause        of its last failure
    """

    def __init__(self, engine: ServedEngine) -> None:
        self.engine = engine
        self.active_requests = 0
        self.down_until: float | None = None
        self.cause = ""

    def __str__(self) -> str:
        return self.cause if self.engine.url in self.cause else f"{self.engine.url}: {self.cause or 'not reached yet'}"

    @property
    def is_aside(self) -> bool:
        """Whether it is not used until its next weights."""
        return self.down_until == math.inf

    def take_out(self, cause: BaseException, cooldown_s: float) -> None:
        """Do not use the engine for a while; `math.inf`: until it has taken new weights."""
        if self.is_aside:
            return
        self.down_until, self.cause = time.monotonic() + cooldown_s, one_line(cause)
        if self.is_aside:
            logger.warning("a rollout server is put aside until its next weight update: %s", self)

    def put_back(self) -> None:
        """Use the engine again."""
        self.down_until, self.cause = None, ""

    @contextmanager
    def request(self, cooldown_s: float) -> Iterator[ServedEngine]:
        """Run a request on this engine; take it out of rotation if it is unavailable or its answer cannot be used."""
        self.active_requests += 1
        try:
            yield self.engine
        except EngineUnavailableError as failure:
            self.take_out(failure, cooldown_s)
            raise
        except EngineAnswerError as wrong:
            self.take_out(wrong, math.inf)
            raise
        finally:
            self.active_requests -= 1
