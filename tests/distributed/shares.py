"""What every store of trajectories must do: each rank gets its own sequences with its own layers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moe_replay.distributed.collectives import broadcast_bytes, open_control_group
from moe_replay.distributed.ranks import barrier, rank
from moe_replay.records import Trajectory
from moe_replay.train.trajectories.wire import batch_from_bytes, batch_to_bytes
from tests.support.trajectory_bytes import trajectories_to_bytes
from tests.train.trajectories import LAYERS, random_mask, random_trajectory

HALVES = (LAYERS[:1], LAYERS[1:])
COUNT = 12


def trajectories() -> list[Trajectory]:
    made = [random_trajectory(number, prompt=3, completion=5 + 7 * number) for number in range(COUNT)]
    return [*made[:-1], replace(made[-1], sampling_mask=random_mask(made[-1], 97))]


def share_of(open_store: Callable[[int], Any], data_ranks: Sequence[int], layers: Sequence[Sequence[int]]) -> list[int]:
    """Get every third trajectory from the data rank's first on: bytes received here, of the share and of all."""
    own = rank()
    with open_control_group():
        store = open_store(own)
        for step in range(2):
            whole = trajectories()[step:]
            sent = broadcast_bytes(batch_to_bytes(store.put(whole)) if own == 0 else None)
            batch = batch_from_bytes(sent)
            assert len(sent) < 100 * len(whole) + 1000
            numbers = list(range(data_ranks[own], len(whole), 3))[::-1]
            before = store.received_bytes
            for number, found in zip(numbers, store.get(batch, numbers, layers[own]), strict=True):
                _check(found, whole[number], tuple(layers[own]) or LAYERS[:1])
            received = store.received_bytes - before
            if own == 0:
                for found, wanted in zip(store.whole(batch, range(3)), whole, strict=False):
                    _check(found, wanted, LAYERS)
                    assert found.trace.to_bytes() == wanted.trace.to_bytes()
            barrier()  # as the rollout of the next step is
        share = len(trajectories_to_bytes([whole[i] for i in numbers], layers[own]))
        store.close()
    return [received, share, len(trajectories_to_bytes(whole))]


def _check(found: Trajectory, wanted: Trajectory, layers: tuple[int, ...]) -> None:
    assert found.trace == wanted.trace.select_layers(layers)
    assert (found.row, found.group, found.finish_reason) == (wanted.row, wanted.group, wanted.finish_reason)
    assert (found.advantage, found.sampling_mask) == (wanted.advantage, wanted.sampling_mask)
    np.testing.assert_equal(found.reward, wanted.reward)
    for name in ("token_ids", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
