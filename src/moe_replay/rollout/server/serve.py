"""Serving an engine until a signal: running requests are aborted, and the engine is closed whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moe_replay.errors import EngineError, EngineOptionError, EngineUnavailableError
from moe_replay.rollout.engine import Engine
from moe_replay.rollout.request_limits import RequestLimits, timed_protocol
from moe_replay.utils.signals import EndSignals

GRACE_S = 5.0
HEALTH_CHECK_S = 2.0


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open the socket to serve on. Before the engine is started, so that a taken port is found at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((host, port))
        except (OSError, OverflowError, ValueError) as error:
            raise EngineOptionError(
                f"cannot listen on {host} port {port}: {error}", remedy="Choose another --port, or another --host"
            ) from error
        yield opened


class Server:
    """Serves one engine. The first SIGINT, SIGTERM or SIGHUP ends it in order, the second at once.

    Example:
        with listening("127.0.0.1", 8000) as opened:
            Server(opened).run(start_the_engine, make_the_application)
    """

    def __init__(self, opened: socket.socket, limits: RequestLimits | None = None) -> None:
        self._socket = opened
        self._limits = limits or RequestLimits()
        self._server: Any = None
        self._asked = threading.Event()

    def run(self, start: Callable[[], Engine], build: Callable[[Engine], Any]) -> None:
        """Start the engine and serve it; returns when a signal has ended the server, raises if the engine dies."""
        with EndSignals(self._on_signal, end_after=2, farewell="the rollout server ends at once"):
            engine = start()
            try:
                self._serve(engine, build(engine))
            finally:
                engine.close()

    def _on_signal(self, number: signal.Signals, count: int) -> None:
        if self._server is None:  # vLLM's start cannot be interrupted; its processes end with this one
            os._exit(128 + number)
        self._asked.set()

    def _serve(self, engine: Engine, app: Any) -> None:
        import uvicorn

        settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": int(GRACE_S)}
        self._server = server = uvicorn.Server(uvicorn.Config(app, http=timed_protocol(self._limits), **settings))
        # In a thread uvicorn leaves signals alone; in the main thread it would end the process before the engine.
        thread = threading.Thread(target=server.run, kwargs={"sockets": [self._socket]}, name="server")
        thread.start()
        try:
            while not self._asked.wait(HEALTH_CHECK_S) and thread.is_alive():
                if not engine.healthy():
                    raise EngineUnavailableError(f"{engine.name} has died", remedy="Its log names the cause")
            if not self._asked.is_set():
                raise EngineError("the HTTP server ended by itself", remedy="Its log names the cause")
            app.state.is_ending = True
            engine.abort()
        finally:
            server.should_exit = True
            thread.join()
