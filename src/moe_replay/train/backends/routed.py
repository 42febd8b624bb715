"""What a pass wants of the routers, done for one forward of one chunk of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_replay.replay.controller import RouterReplay
from moe_replay.train.backends.base import Routing
from moe_replay.train.micro_batch import MicroBatch


@contextmanager
def routed(replay: RouterReplay, batch: MicroBatch, chunk: int, routing: Routing) -> Iterator[None]:
    """Around the one forward of `batch` through this chunk; what it recorded or observed is kept in the batch."""
    if routing.action == "record":
        with replay.record() as recording:
            yield
        batch.routes[chunk] = recording.batch()
    elif routing.action == "replay":
        with replay.replay(batch.routes[chunk], observe=routing.observe) as replaying:
            yield
        if routing.observe:
            batch.native[chunk] = replaying.native()
    else:
        yield
