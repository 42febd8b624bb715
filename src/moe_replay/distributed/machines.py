"""The machines of a job: which ranks share one, and at which address the others reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # an address of no machine (RFC 5737), reached by the default route


def machine_id() -> str:
    """Return what the processes of this machine have in common, or of a container; "" where they cannot be watched."""
    try:
        os.close(os.pidfd_open(os.getpid()))
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except (AttributeError, OSError):
        return ""


def address_towards(host: str) -> str:
    """Return the address of this machine on the way to another one."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: it only picks the route
        return str(probe.getsockname()[0])


def own_address() -> str:
    """Return the address of this machine on the way to the launcher's, or to the world; else the loopback."""
    for host in (os.environ.get("MASTER_ADDR"), _ELSEWHERE):
        try:
            if host is not None:
                return address_towards(host)
        except OSError:  # no such name, no way there
            continue
    return LOOPBACK
