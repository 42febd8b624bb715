"""Waiting until a cluster has room for a run, before anything of it is started."""

from __future__ import annotations

import time
from collections.abc import Callable

from moe_replay.cluster.capacity import CapacityError, check_capacity, demand_of_layout
from moe_replay.cluster.layout import Layout
from moe_replay.cluster.nodes import read_nodes

PAUSE_S = 1.0


def wait_for_room(layout: Layout, limit_s: float, tell: Callable[[str], None]) -> None:
    """Raise if the cluster cannot hold a run; wait for other jobs as long as they leave too little.

    limit_s   seconds after which that is an error
    """
    import ray

    demand, end, is_told = demand_of_layout(layout), time.monotonic() + limit_s, False
    while True:
        nodes = read_nodes(ray)
        check_capacity([node._replace(free=node.total) for node in nodes], demand)
        try:
            check_capacity(nodes, demand)
            return
        except CapacityError as full:
            if time.monotonic() > end:
                raise
            if not is_told and time.monotonic() > end - limit_s + PAUSE_S:
                is_told = True
                tell(f"waiting up to {limit_s:g} s for other jobs: {full.problem}")
        time.sleep(PAUSE_S)
