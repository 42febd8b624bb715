"""An application on a free port of the loopback, in a thread, for as long as a test needs it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def responds(client: Any) -> bool:
    """Whether a client finds its server healthy; one question has five seconds, for which a machine may stall."""
    return any(client.healthy() for _ in range(20))


@contextmanager
def serving(app: Any, **settings: Any) -> Iterator[str]:
    """The address of the application; settings are uvicorn's."""
    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", **settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
