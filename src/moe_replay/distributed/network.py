"""Addresses of this machine, and the server of rank 0 that the other ranks connect to."""

from __future__ import annotations

import errno
import hmac
import math
import os
import secrets
import selectors
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from moe_replay.distributed.ranks import all_gather_json, from_rank_0

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # an address of no machine (RFC 5737), reached by the default route


def machine_id() -> str:
    """Return an id shared by all processes of one machine or container; "" where processes cannot be watched."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except (AttributeError, OSError):
        return ""


def address_towards(host: str) -> str:
    """Return the address from which this machine reaches a host."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only picks the route
        return str(probe.getsockname()[0])


def address_seen_by(url: str) -> str:
    """Return the address of this machine that a server sees; the loopback for an engine of this process, ""."""
    host = urlsplit(url).hostname
    return LOOPBACK if host is None else address_towards(host)


def open_listener(address: str) -> socket.socket:
    """Listen on a free port of an address of this machine, of IPv4 or IPv6."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def free_port(address: str) -> int:
    """Return a port of an address of this machine that nothing listens on."""
    with open_listener(address) as listener:
        return port_of(listener)


def own_address() -> str:
    """Return the address from which this machine reaches the launcher, or the outside; else the loopback."""
    for host in (os.environ.get("MASTER_ADDR"), _ELSEWHERE):
        try:
            if host is not None:
                return address_towards(host)
        except OSError:  # no such name, no way there
            continue
    return LOOPBACK


TOKEN_BYTES = 32
BACKLOG = 4096
HANDSHAKE_S = 5.0
"""Seconds that a new connection has to show the token."""
MAX_STRANGERS = 64
"""Connections that may be open without having shown it; with more of them the oldest is closed."""
_POLL_S = 1.0
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class RankServer(NamedTuple):
    """Address that rank 0 listens on, and the token that proves a rank of this job; on rank 0 also the socket."""

    host: str
    port: int
    token: bytes
    listener: socket.socket | None = None


def open_rank_server(machines: Sequence[str], doing: str) -> RankServer:
    """Have rank 0 listen at an address that all ranks reach. Collective: call on every rank.

    machines   of each rank, by `machine_id`
    """
    hosts = [""] * len(machines)
    if len(set(machines)) > 1:
        hosts = all_gather_json(own_address())
    elsewhere = [host for host, machine in zip(hosts, machines, strict=True) if machine != machines[0]]
    listeners: list[socket.socket] = []

    def listen() -> tuple[str, int, str]:
        host = address_towards(elsewhere[0]) if elsewhere else LOOPBACK
        listeners.append(open_listener(host))
        return host, port_of(listeners[0]), secrets.token_hex(TOKEN_BYTES)

    host, port, token = from_rank_0(listen, doing)
    return RankServer(host, port, bytes.fromhex(token), next(iter(listeners), None))


def admitted(
    listener: socket.socket, token: bytes, hello_bytes: int = 0, timeout_s: float = math.inf
) -> Generator[tuple[socket.socket, bytes]]:
    """Yield each connection that begins with the token, and the bytes that follow it, until the listener is closed.

    A connection without the token takes no thread, delays no other one, and is closed after `HANDSHAKE_S`.

    hello_bytes   number of bytes that follow the token
    timeout_s     longest time for all connections, after which `TimeoutError` is raised
    """
    deadline = time.monotonic() + timeout_s
    handshakes: list[_Handshake] = []
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, ExitStack() as strangers:
        strangers.callback(lambda: [handshake.connection.close() for handshake in handshakes])
        selector.register(listener, selectors.EVENT_READ)
        while listener.fileno() >= 0:
            selector.select(_POLL_S)
            try:
                connection, _ = listener.accept()
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ)
                handshakes.append(_Handshake(connection, len(token) + hello_bytes))
            except (BlockingIOError, ConnectionError):  # it has left again
                pass
            except OSError as error:
                if error.errno not in _TOO_MANY_FILES:
                    return  # closed
                time.sleep(_POLL_S)
            ended = [handshake for handshake in handshakes if handshake.is_over()]
            for handshake in ended or handshakes[:-MAX_STRANGERS]:
                handshakes.remove(handshake)
                selector.unregister(handshake.connection)
                received = handshake.received
                if len(received) == len(token) + hello_bytes and hmac.compare_digest(received[: len(token)], token):
                    handshake.connection.setblocking(True)
                    yield handshake.connection, received[len(token) :]
                else:
                    handshake.connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")


class _Handshake:
    """A connection that has not shown the token yet, and what it has sent so far."""

    def __init__(self, connection: socket.socket, size: int) -> None:
        self.connection = connection
        self.received = b""
        self._size, self._deadline = size, time.monotonic() + HANDSHAKE_S

    def is_over(self) -> bool:
        """Read what has arrived; return whether all of it has, or nothing more may."""
        try:
            content = self.connection.recv(self._size - len(self.received))
        except BlockingIOError:
            return time.monotonic() > self._deadline
        except OSError:  # reset
            return True
        self.received += content
        return not content or len(self.received) == self._size or time.monotonic() > self._deadline


def receive_into(connection: socket.socket, target: memoryview) -> int:
    """Fill a buffer; return how many bytes came before the connection closed."""
    filled = 0
    while filled < len(target):
        count = connection.recv_into(target[filled:])
        if not count:
            break
        filled += count
    return filled
