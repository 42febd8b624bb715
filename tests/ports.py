"""Ports of the loopback that nobody else is given, and servers that listen there."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which nothing listens, and which only a server that is told its number can take.

    The socket stays bound, so the system gives the port to no other process. It does not listen, so a server that sets
    SO_REUSEADDR, as they all do, can bind to it as well; until then connections are refused.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def answers(port: int) -> bool:
    """Whether a server answers that it is well; cheap to ask often."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
