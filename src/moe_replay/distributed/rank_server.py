"""A server of rank 0 that the other ranks connect to: its address, on this machine alone if there is no other."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from collections.abc import Sequence
from typing import NamedTuple

from moe_replay.distributed.machines import LOOPBACK, address_towards, own_address
from moe_replay.distributed.ranks import all_gather_text, from_rank_0

TOKEN_BYTES = 32
BACKLOG = 4096


class RankServer(NamedTuple):
    """Address that rank 0 listens on, and the token that proves a rank of this job; on rank 0 also the socket."""

    host: str
    port: int
    token: bytes
    listener: socket.socket | None = None


def open_rank_server(machines: Sequence[str], doing: str) -> RankServer:
    """Have rank 0 listen at an address that all ranks reach. All ranks call it.

    machines   of each rank, by `machine_id`
    """
    hosts = [""] * len(machines)
    if len(set(machines)) > 1:
        hosts = all_gather_text(own_address())
    elsewhere = [host for host, machine in zip(hosts, machines, strict=True) if machine != machines[0]]
    listeners: list[socket.socket] = []

    def listen() -> str:
        host = address_towards(elsewhere[0]) if elsewhere else LOOPBACK
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listeners.append(socket.create_server((host, 0), family=family, backlog=BACKLOG))
        return json.dumps([host, listeners[0].getsockname()[1], secrets.token_hex(TOKEN_BYTES)])

    host, port, token = json.loads(from_rank_0(listen, doing))
    return RankServer(host, port, bytes.fromhex(token), next(iter(listeners), None))


def has_token(connection: socket.socket, token: bytes) -> bool:
    """Read a token from a new connection; return whether it is that of this job."""
    said = bytearray(len(token))
    return receive_into(connection, memoryview(said)) == len(token) and hmac.compare_digest(said, token)


def receive_into(connection: socket.socket, target: memoryview) -> int:
    """Fill a buffer; return how many bytes came before the connection closed."""
    filled = 0
    while filled < len(target):
        count = connection.recv_into(target[filled:])
        if not count:
            break
        filled += count
    return filled
