"""Trajectories of a driver process are put into a store as those of this process are, byte for byte."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from moe_replay.errors import EngineUnavailableError, MoeReplayError
from moe_replay.rollout.types import SamplingParams
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import Prompt
from moe_replay.train.drivers import group_wire
from moe_replay.train.drivers.channel import DriverError, error_from_content, error_to_content
from moe_replay.train.drivers.group_wire import GroupWriter, group_from_content, map_segment
from moe_replay.train.groups import GroupTask
from moe_replay.train.reward_pool.wire import from_content, to_frame
from moe_replay.train.trajectories.encoded import decoded, parts_of, recorded_layers
from moe_replay.train.trajectories.header import TrajectoryHeader
from moe_replay.train.types import Group, Trajectory
from tests.train.trajectories import LAYERS, random_trajectory


def over_the_wire(content: dict) -> dict:
    return from_content(to_frame(content)[8:])


def test_records_of_a_driver_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [random_trajectory(number, 2, length, 1) for number, length in enumerate((5, 700, 3, 900))]
    monkeypatch.setattr(group_wire, "SEGMENT_BYTES", 2**14)  # the second group needs a segment of its own
    sets = (LAYERS[:1], LAYERS[1:], None)
    segments: list[memoryview] = []
    writer = GroupWriter(sets, lambda file: segments.append(map_segment(os.dup(file))), lambda one: (str(one.row), "é"))
    found = []
    for pair in (made[:2], made[2:]):
        content = over_the_wire(writer.write(Group(pair, {"a": np.array([0.1, math.nan])})))
        found.append(group_from_content(content, segments[-1], sets))
    writer.close()
    assert len(segments) == 2
    assert np.array_equal(found[0].scores["a"], [0.1, math.nan], equal_nan=True)
    for one, other in zip(made, [one for group in found for one in group.trajectories], strict=True):
        wanted, got = one.with_advantage(0.3), other.with_advantage(0.3)
        assert TrajectoryHeader.of(got) == TrajectoryHeader.of(wanted)
        assert recorded_layers(got) == LAYERS
        assert got.texts == (str(one.row), "é")  # type: ignore[attr-defined]
        for layers in sets[:2]:
            assert b"".join(parts_of(got, layers)) == b"".join(parts_of(wanted, layers))  # type: ignore[arg-type]
        assert decoded(got).trace == wanted.trace
        assert decoded(got).advantage == 0.3


def test_a_task_and_its_settings_arrive_as_they_were_sent() -> None:
    params = SamplingParams(n=3, seed=2**62, stop_token_ids=(1, 2), top_p=0.9)
    prompt = Prompt(7, [{"role": "user", "content": "é"}], (1, 2), {"solution": "3", "weight": 0.1})
    task = GroupTask(prompt=prompt, number=5, params=params, first=SamplingParams(seed=1))
    assert group_wire.task_from_content(over_the_wire(group_wire.task_to_content(task))) == task
    config = TrainConfig(
        output=Path("runs/a"), rollout={"environment_timeout_s": math.inf, "token": "secret", "options": {"a": 1.5}}
    )
    sent = json.loads(json.dumps(config.model_dump(mode="json")))
    assert TrainConfig.model_validate(sent) == config


@pytest.mark.parametrize(
    "error", [EngineUnavailableError("gone", found="it", token=3), MoeReplayError("p", remedy="r")]
)
def test_errors_of_a_driver_keep_their_class(error: MoeReplayError) -> None:
    found = error_from_content(over_the_wire(error_to_content(error)), "driver 1")
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_an_error_that_is_none_of_ours_is_named() -> None:
    found = error_from_content(over_the_wire(error_to_content(KeyError("x"))), "driver 1")
    assert isinstance(found, DriverError)
    assert "KeyError: 'x'" in str(found)
    assert "In driver 1" in found.__notes__[0]


def test_a_trajectory_is_its_own_kind() -> None:
    assert isinstance(decoded(random_trajectory(4, 1, 3)), Trajectory)
