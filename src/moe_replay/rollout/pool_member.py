"""One server of a pool: its load, whether it is used, and its state as shared with pools in other processes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

from moe_replay.errors import EngineAnswerError, EngineError, EngineUnavailableError
from moe_replay.rollout.engine import Engine
from moe_replay.rollout.weights.identity import CurrentWeights, identifies_weights
from moe_replay.utils.messages import one_line

logger = logging.getLogger(__name__)
LISTED_S = 120.0
"""Seconds after which a server that was lost is no longer listed: more than a cluster takes to notice."""


class ServedEngine(Engine, Protocol):
    """An engine behind a URL."""

    url: str

    def current_weights(self) -> CurrentWeights:
        """Return what the server says of its weights."""
        ...


class ServerState(NamedTuple):
    """Whether a server is used.

    cause                why it is not; empty: it is
    is_quarantined       excluded until it accepts the next weight update
    identifies_weights   whether its samples have a weights id
    """

    cause: str
    is_quarantined: bool
    identifies_weights: bool


@runtime_checkable
class Following(Protocol):
    """A client of a server that another process updates.

    drains               it stamps samples with versions itself, so that none may be on its way during an update
    identifies_weights   samples of the server have a weights id
    """

    drains: bool
    identifies_weights: bool

    def follow_update(self, version: int, weights_id: str) -> None:
        """Accept samples of weights that another process sends to the server."""
        ...


def following(engine: Any) -> Following:
    """Return an engine as a client of a server that another process updates; raise if it is none."""
    if not isinstance(engine, Following):
        raise EngineError(
            f"{type(engine).__name__} cannot be used by several processes",
            expected="a client that has follow_update",
            remedy="Set rollout.drivers = 1",
        )
    return engine


class Member:
    """One engine of the pool, its load, and why and for how long it is not used after a failure.

    down_until   time at which its health is checked again: never, for a quarantined one; None: it is in use
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
    def is_quarantined(self) -> bool:
        """Whether it is excluded until it accepts the next weight update."""
        return self.down_until == math.inf

    def take_out(self, cause: BaseException, cooldown_s: float) -> None:
        """Do not use the engine for a while; `math.inf`: until it has taken new weights."""
        if self.is_quarantined:
            return
        self.down_until, self.cause = time.monotonic() + cooldown_s, one_line(cause)
        if self.is_quarantined:
            logger.warning("a rollout server is quarantined until its next weight update: %s", self)

    def put_back(self) -> None:
        """Use the engine again."""
        self.down_until, self.cause = None, ""

    @property
    def state(self) -> ServerState:
        """State for other pools of the same server."""
        cause = "" if self.down_until is None else self.cause or "not reached yet"
        return ServerState(cause, self.is_quarantined, identifies_weights(self.engine))

    def follow(self, state: ServerState | None, cooldown_s: float) -> None:
        """Use the engine, or do not, as another pool does; None: that one does not have it."""
        self.put_back()
        if state is None:
            self.take_out(EngineUnavailableError("it was not updated"), cooldown_s)
            return
        following(self.engine).identifies_weights = state.identifies_weights
        if state.cause:
            self.take_out(EngineError(state.cause), math.inf if state.is_quarantined else cooldown_s)

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


class ServerList:
    """A list of servers that changes, and the members of a pool by it.

    urls     returns the addresses of all servers now; it may wait for the first one
    client   connects to one that has joined
    """

    def __init__(self, urls: Callable[[], Sequence[str]], client: Callable[[str], ServedEngine]) -> None:
        self._urls, self._client = urls, client
        self.left: list[ServedEngine] = []

    def members(self, known: list[Member]) -> list[Member]:
        """Return the members that are listed now, or `known` itself if they are the same."""
        urls = list(dict.fromkeys(self._urls()))
        by_url = {member.engine.url: member for member in known}
        if not urls or set(urls) == by_url.keys():
            return known
        members = [by_url.pop(url) if url in by_url else _joined(self._client(url)) for url in urls]
        self.left += [member.engine for member in by_url.values()]
        return members


def _joined(engine: ServedEngine) -> Member:
    logger.warning("a rollout server has joined: %s", engine.url)
    member = Member(engine)
    member.take_out(EngineUnavailableError("it has joined, and has no weights yet"), 0.0)
    return member
