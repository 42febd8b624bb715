"""Routing of one forward of one chunk of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_replay.replay.controller import RouterReplay
from moe_replay.routes.batch import RouteBatch
from moe_replay.train.backends.base import Routing
from moe_replay.train.micro_batch import MicroBatch


@contextmanager
def apply_routing(replay: RouterReplay, batch: MicroBatch, chunk: int, routing: Routing) -> Iterator[None]:
    """Route the one forward of `batch` through this chunk; keep in the batch what is recorded or observed."""
    if routing.action == "replay":
        routes = batch.lay_out_routes(chunk) if routing.source == "rollout" else batch.recorded_routes[chunk]
        with replay.replay(routes, observe=routing.observe) as replaying:
            yield
        if routing.observe:
            _keep(batch, chunk, routing, replaying.native(), routes)
    elif routing.action == "record" or routing.observe:
        with replay.record() as recording:
            yield
        taken = recording.batch()
        if routing.action == "record":
            batch.recorded_routes[chunk] = taken
        if routing.observe:
            _keep(batch, chunk, routing, taken, None)
    else:
        yield


def _keep(batch: MicroBatch, chunk: int, routing: Routing, native: RouteBatch, replayed: RouteBatch | None) -> None:
    if routing.observer is None:
        batch.native_routes[chunk] = native
    else:
        routing.observer(batch, chunk, native, replayed)
