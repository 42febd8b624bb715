"""`RunBoard`: shared state of a run on Ray, held by a named actor in the namespace `moe-replay`.

The driver, rank 0 and `moe-replay cluster` leave there what the others have to know. Nothing in it waits: whoever needs
a change looks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

NAMESPACE = "moe-replay"
PREFIX = "run "
KEPT_LINES = 1000


class EngineOrder(NamedTuple):
    """Engine start request from rank 0: the name of the engine, and the fields of its `StartRequest`."""

    engine: str
    request: dict[str, Any]


class EngineList(NamedTuple):
    """The engines of a run that can be used now.

    urls       of those that are ready
    starting   how many are being started
    error      why there will be no more of them
    """

    urls: tuple[str, ...] = ()
    starting: int = 0
    error: str = ""


class DriverView(NamedTuple):
    """State that the driver polls: rank 0's order, the number of engines wanted, and new output of rank 0."""

    order: EngineOrder | None
    wanted: int
    output: bytes


class RunBoard:
    """State of one run. The methods of an actor: each call is one message.

    engines      how many engines the recipe asks for
    token        of the engines
    can_change   their number may change: they have their own resources
    engine       resources of each of them, by Ray's names
    """

    def __init__(
        self, engines: int, token: str, can_change: bool = True, engine: Mapping[str, float] | None = None
    ) -> None:
        self._token = token
        self._wanted = engines
        self._can_change, self._engine = can_change and engines > 0, dict(engine or {})
        self._order: EngineOrder | None = None
        self._engines = EngineList()
        self._output: deque[bytes] = deque()
        self._interrupts = 0
        self._events: deque[str] = deque(maxlen=KEPT_LINES)

    # ---- of rank 0 ----------------------------------------------------------------------------------------------

    def order(self, order: EngineOrder) -> str:
        """Ask for engines; returns their token."""
        self._order = order
        return self._token

    def engines(self) -> EngineList:
        """Return the engines that can be used now."""
        return self._engines

    def tell(self, output: bytes) -> int:
        """Leave new output for the driver to show; returns how often the run was asked to end."""
        if output:
            self._output.append(output)
        return self._interrupts

    # ---- of the driver ------------------------------------------------------------------------------------------

    def view(self) -> DriverView:
        """Return what is new for the driver, and forget the output."""
        output = b"".join(self._output)
        self._output.clear()
        return DriverView(self._order, self._wanted, output)

    def set_engines(self, engines: EngineList) -> None:
        """Say which engines there are."""
        self._engines = engines

    def interrupt(self) -> None:
        """Ask the run to end after the current step."""
        self._interrupts += 1

    def event(self, text: str) -> None:
        """Keep a line of what has happened to the run."""
        self._events.append(text)

    # ---- of anybody ---------------------------------------------------------------------------------------------

    def scale(self, engines: int) -> int:
        """Ask for another number of engines; returns the number before. They join and leave between steps."""
        before, self._wanted = self._wanted, engines
        return before

    def status(self) -> dict[str, Any]:
        """Return what is known of the run, for people: engines wanted, ready and starting, and what has happened."""
        return {
            "wanted": self._wanted,
            "can_change": self._can_change,
            "engine": self._engine,
            "urls": list(self._engines.urls),
            "starting": self._engines.starting,
            "error": self._engines.error,
            "events": list(self._events),
        }


def board_name(run: str) -> str:
    """Return the name of the actor of a run, which is called as its folder."""
    return f"{PREFIX}{run}"
