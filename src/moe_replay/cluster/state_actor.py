"""`RunState`: the shared state of a run on Ray, a named actor in the namespace `moe-replay`.

The driver, rank 0 and `moe-replay cluster` exchange everything through it. No method blocks: readers poll.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

NAMESPACE = "moe-replay"
PREFIX = "run "
MAX_EVENTS = 1000


class EngineRequest(NamedTuple):
    """Rank 0's request for engines: the engine's name and the fields of its `StartRequest`."""

    engine: str
    fields: dict[str, Any]


class EngineList(NamedTuple):
    """The engines of a run."""

    urls: tuple[str, ...] = ()  # of those that are ready
    starting: int = 0  # number of engines being started
    error: str = ""  # why no more engines will start; empty otherwise


class DriverView(NamedTuple):
    """State that the driver polls: rank 0's request, the desired number of engines, and rank 0's new output."""

    request: EngineRequest | None
    desired_engines: int
    scalings: int  # how often that number has been set, also to the same one
    output: bytes


class RunState:
    """State of one run. Every method is an actor call, one message each.

    engines      number of engines in the recipe
    token        for requests to the engines
    can_scale    the number of engines may change: they have separate resources
    resources    of each engine, by Ray's resource names
    """

    def __init__(
        self, engines: int, token: str, can_scale: bool = True, resources: Mapping[str, float] | None = None
    ) -> None:
        self._token = token
        self._desired_engines, self._scalings = engines, 0
        self._can_scale, self._resources = can_scale and engines > 0, dict(resources or {})
        self._request: EngineRequest | None = None
        self._engines = EngineList()
        self._output: deque[bytes] = deque()
        self._interrupts = 0
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)

    # ---- called by rank 0 ---------------------------------------------------------------------------------------

    def request_engines(self, request: EngineRequest) -> str:
        """Ask the driver to start engines; returns their token."""
        self._request = request
        return self._token

    def engines(self) -> EngineList:
        return self._engines

    def push_output(self, output: bytes) -> int:
        """Queue console output for the driver; returns how many times the run was interrupted."""
        if output:
            self._output.append(output)
        return self._interrupts

    # ---- called by the driver -----------------------------------------------------------------------------------

    def view(self) -> DriverView:
        """Return the state the driver acts on, and clear the queued output."""
        output = b"".join(self._output)
        self._output.clear()
        return DriverView(self._request, self._desired_engines, self._scalings, output)

    def set_engines(self, engines: EngineList) -> None:
        self._engines = engines

    def interrupt(self) -> None:
        """Ask the run to stop after the current step."""
        self._interrupts += 1

    def add_event(self, text: str) -> None:
        self._events.append(text)

    # ---- called by `moe-replay cluster` -------------------------------------------------------------------------

    def scale(self, engines: int) -> int:
        """Set the desired number of engines, which join and leave between steps; returns the previous number."""
        before, self._desired_engines = self._desired_engines, engines
        self._scalings += 1
        return before

    def status(self) -> dict[str, Any]:
        """Return the fields of a `RunStatus` besides its name."""
        return {
            **self._engines._asdict(),
            "desired_engines": self._desired_engines,
            "can_scale": self._can_scale,
            "engine": self._resources,
            "events": tuple(self._events),
        }


def actor_name(run: str) -> str:
    """Return the name of a run's state actor; `run` is the name of the run folder."""
    return f"{PREFIX}{run}"
