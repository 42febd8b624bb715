"""Routing of one forward of one chunk of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_replay.replay.controller import RouterReplay
from moe_replay.train.backends.base import Routing
from moe_replay.train.micro_batch import MicroBatch


@contextmanager
def apply_routing(replay: RouterReplay, batch: MicroBatch, chunk: int, routing: Routing) -> Iterator[None]:
    """Route the one forward of `batch` through this chunk; keep in the batch what is recorded or observed."""
    if routing.action == "replay":
        routes = batch.rollout_routes if routing.source == "rollout" else batch.recorded_routes
        with replay.replay(routes[chunk], observe=routing.observe) as replaying:
            yield
        if routing.observe:
            batch.native_routes[chunk] = replaying.native()
    elif routing.action == "record" or routing.observe:
        with replay.record() as recording:
            yield
        taken = recording.batch()
        if routing.action == "record":
            batch.recorded_routes[chunk] = taken
        if routing.observe:
            batch.native_routes[chunk] = taken
    else:
        yield
