"""Bytes and seconds of a weight update by each transport, at assumed rates."""

from __future__ import annotations

from dataclasses import dataclass

from moe_replay.tools.plan.layout import aligned, size


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Assumed GB/s of each part of an update.

    network   into or out of a node; default 100 Gbit/s
    device    between GPUs of a node, into one of them
    copy      through a device buffer into the engine's tensors; measured on an H200 with 11 GB
    sender    http, rank 0: to host memory, serialize, send; half of the time at 0.35 GB/s, as measured on an H200
    server    http, server: read, write for its workers, load; the other half
    """

    network: float = 12.5
    device: float = 200.0
    copy: float = 50.0
    sender: float = 0.7
    server: float = 0.7


@dataclass(frozen=True)
class SyncCost:
    """One update by one transport.

    sent      bytes that leave rank 0, or with ipc the memory of all ranks
    seconds   sum of all parts, without overlap
    """

    kind: str
    sent: float
    seconds: float


def plan_sync(
    parameters: int, *, nodes: int = 1, servers: int = 1, itemsize: int = 2, rates: Rates | None = None
) -> list[SyncCost]:
    """Return the cost of updating all weights by each transport.

    nodes     trainer nodes
    servers   rollout servers that are updated
    """
    rate, whole = rates or Rates(), float(parameters * itemsize)
    gigabytes = whole / 1e9
    # The sending rank's node already holds 1/nodes of the weights.
    gather = gigabytes * (nodes - 1) / nodes / rate.network + gigabytes / nodes / rate.device
    copy = gigabytes / rate.copy
    http = max(gigabytes / rate.sender, servers * gigabytes / rate.network) + gigabytes / rate.server
    return [
        SyncCost("ipc", whole, gather + copy),
        SyncCost("nccl", whole, gather + gigabytes / rate.network + copy),
        SyncCost("http", servers * whole, gather + http),
    ]


def sync_text(costs: list[SyncCost], rates: Rates | None = None) -> str:
    """Format the costs as a table, with the assumed rates."""
    rate = rates or Rates()
    rows = [("weight update", "sent", "seconds")]
    rows += [(cost.kind, size(cost.sent), f"{cost.seconds:,.1f}") for cost in costs]
    assumed = (
        f"assumed rates in GB/s: network per node {rate.network:g}, between GPUs {rate.device:g}, "
        f"into the engine's tensors {rate.copy:g}, http {rate.sender:g} to send and {rate.server:g} to load"
    )
    return "\n".join([*aligned(rows), assumed])
