"""Serving an engine until a signal: running requests are aborted, and the engine is closed whatever happens."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moe_replay.engines.base import Engine
from moe_replay.engines.requests import RequestLimits
from moe_replay.errors import EngineError, EngineOptionError, EngineUnavailableError
from moe_replay.utils.signals import EndSignals

SHUTDOWN_TIMEOUT_S = 5.0
HEALTH_CHECK_S = 2.0


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open the socket to serve on. Before the engine is started, so that a taken port is found immediately."""
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


class _InterruptedStart(KeyboardInterrupt):
    """A signal before requests are served."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Server:
    """Serves one engine. The first SIGINT, SIGTERM or SIGHUP ends it in order, the second immediately.

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
        with EndSignals(self._on_signal, end_after=2, farewell="the rollout server ends immediately"):
            try:
                engine = start()
                try:
                    self._serve(engine, build(engine))
                finally:
                    engine.close()
            except _InterruptedStart as interrupted:
                raise SystemExit(128 + interrupted.number) from None

    def _on_signal(self, number: signal.Signals, count: int) -> None:
        if self._server is None:
            raise _InterruptedStart(number)
        self._asked.set()

    def _serve(self, engine: Engine, app: Any) -> None:
        import uvicorn

        settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": int(SHUTDOWN_TIMEOUT_S)}
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


def timed_protocol(limits: RequestLimits) -> type[Any]:
    """Return uvicorn's HTTP protocol that closes connections beyond the limits: too many, or too slow with headers."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol

    class TimedProtocol(Protocol):  # type: ignore[misc, valid-type]
        """One connection; `cycle` is uvicorn's current request, from its headers on."""

        _timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()
            if len(self.connections) > limits.max_connections:
                transport.abort()

        def data_received(self, data: bytes) -> None:
            if not self._answering():
                self._start_timer()
            super().data_received(data)
            if self._answering():
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _start_timer(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(limits.header_s, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return TimedProtocol
