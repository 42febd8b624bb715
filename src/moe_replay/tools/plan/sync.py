"""What an update of the engines' weights moves and takes by each kind, at rates that are assumed and said."""

from __future__ import annotations

from dataclasses import dataclass

from moe_replay.tools.plan.text import aligned, size

_DELTA_BYTES = 2  # of the distance of a changed element from the one before


@dataclass(frozen=True, kw_only=True)
class Rates:
    """GB/s of each part of an update, and the share of elements that a step changes.

    network   into or out of a node; 100 Gbit/s unless said otherwise
    device    between GPUs of a node, into one of them
    copy      through a buffer on the device into the engine's tensors; measured on an H200 with 11 GB
    sender    http, rank 0: to host memory, serialised, sent; half of 0.35 GB/s, as measured on an H200, is this part
    server    http, server: read, written for its workers, loaded; the other half
    compare   delta: comparison and checksum of weights in host memory
    changed   delta: elements of half-precision weights that one step changes
    """

    network: float = 12.5
    device: float = 200.0
    copy: float = 50.0
    sender: float = 0.7
    server: float = 0.7
    compare: float = 4.0
    changed: float = 0.01


@dataclass(frozen=True)
class SyncCost:
    """One update by one kind.

    sent      bytes that leave rank 0, or with ipc the memory of all ranks
    seconds   parts of an update one after the other
    kept      host memory on each side that stays between updates
    """

    kind: str
    sent: float
    seconds: float
    kept: float = 0.0


def plan_sync(
    parameters: int, *, nodes: int = 1, servers: int = 1, itemsize: int = 2, rates: Rates | None = None
) -> list[SyncCost]:
    """Return the costs of an update of all weights by each kind.

    nodes     of the trainer
    servers   that are updated
    """
    rate, whole = rates or Rates(), float(parameters * itemsize)
    gigabytes = whole / 1e9
    # The node of a rank that hands weights over has 1/nodes of them already.
    gather = gigabytes * (nodes - 1) / nodes / rate.network + gigabytes / nodes / rate.device
    copy = gigabytes / rate.copy
    share = rate.changed * (1 + _DELTA_BYTES / itemsize)
    http = max(gigabytes / rate.sender, servers * gigabytes / rate.network) + gigabytes / rate.server
    delta = gigabytes / rate.compare + max(share * gigabytes / rate.sender, servers * share * gigabytes / rate.network)
    return [
        SyncCost("ipc", whole, gather + copy),
        SyncCost("nccl", whole, gather + gigabytes / rate.network + copy),
        SyncCost("http", servers * whole, gather + http),
        SyncCost("http, delta", servers * share * whole, gather + delta + gigabytes / rate.server, whole),
    ]


def sync_text(costs: list[SyncCost], rates: Rates | None = None) -> str:
    """Format the costs for a terminal, with the rates that they assume."""
    rate = rates or Rates()
    rows = [("update of weights", "sent", "seconds", "kept in host memory on each side")]
    rows += [(one.kind, size(one.sent), f"{one.seconds:,.1f}", size(one.kept) if one.kept else "-") for one in costs]
    assumed = (
        f"assumed, in GB/s: network of a node {rate.network:g}, between GPUs {rate.device:g}, "
        f"into the engine's tensors {rate.copy:g}, http {rate.sender:g} to send and {rate.server:g} to load, "
        f"comparison {rate.compare:g}; {rate.changed:.0%} of the elements change"
    )
    return "\n".join([*aligned(rows), assumed])
