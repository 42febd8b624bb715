"""Routes are on the device for the micro-batches in flight, not for all of a step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from moe_replay.records import MicroBatch
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.train.backends import base as routing
from moe_replay.train.learn import learner
from moe_replay.train.loop import train
from tests.combinations import with_whole_runs

pytest.importorskip("transformers")

Config = Callable[..., Any]


@pytest.mark.parametrize("mode", with_whole_runs(["r3", "off"], ["off"]))
def test_routes_of_few_micro_batches_are_alive_at_once(config: Config, mode: str) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most, batches = [0], set()
    plain = routing.captured_routes

    def counted(batch: MicroBatch, chunk: int, layout: TokenLayout) -> RouteBatch:
        gc.collect()
        made = plain(batch, chunk, layout)
        alive.add(made.routed_experts)
        batches.add(id(batch))
        most[0] = max(most[0], len(alive))
        return made

    with mock.patch.object(routing, "captured_routes", counted), mock.patch.object(learner, "captured_routes", counted):
        train(config(replay={"mode": mode}, batch={"tokens_per_micro_batch": 24}, steps=1))
    assert len(batches) > 4
    assert 0 < most[0] <= 3  # that of the pass, the one before it, and the one that is watched
