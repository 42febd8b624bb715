"""Trajectories of a worker process are put into a store as those of this process are, byte for byte."""

from __future__ import annotations

import json
import math
import os
import resource
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_replay.errors import EngineUnavailableError, MoeReplayError
from moe_replay.records import SamplingParams
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.rollout.groups import Group, GroupTask
from moe_replay.train.rollout.prompts import Prompt
from moe_replay.train.rollout.reward_worker import RewardWireError, error_to_content, from_content, to_frame
from moe_replay.train.trajectories.wire import header_of, read_record, stored_parts
from moe_replay.train.workers import wire as group_wire
from moe_replay.train.workers.pool import WorkerPool
from moe_replay.train.workers.wire import (
    GroupWriter,
    WorkerError,
    error_from_content,
    group_from_content,
    map_segment,
)
from tests.train.trajectories import LAYERS, random_trajectory


def over_the_wire(content: dict) -> dict:
    return from_content(to_frame(content)[8:])


@pytest.mark.parametrize("tag", ["pickle", ["set"], None])
def test_a_tag_that_nobody_writes_is_refused(tag: object) -> None:
    with pytest.raises(RewardWireError, match="unknown tag"):
        from_content(json.dumps({"\0moe-replay": tag, "value": []}).encode())


def test_records_of_a_worker_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
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
        wanted, got = replace(one, advantage=0.3), replace(other, advantage=0.3)
        assert header_of(got) == header_of(wanted)
        assert got.layers == LAYERS
        assert not got.trace.covered_fraction  # routes stay encoded on rank 0
        assert got.encoded is not None
        assert got.encoded.texts == (str(one.row), "é")
        for layers in (LAYERS[:1], LAYERS[1:]):
            assert b"".join(stored_parts(got, layers)) == b"".join(stored_parts(wanted, layers))
        assert read_record(got.encoded.records[None]).trace == wanted.trace


def test_a_task_and_its_settings_arrive_as_they_were_sent() -> None:
    params = SamplingParams(n=3, seed=2**62, stop_token_ids=(1, 2), top_p=0.9)
    prompt = Prompt(7, [{"role": "user", "content": "é"}], (1, 2), {"solution": "3", "weight": 0.1})
    task = GroupTask(prompt=prompt, index=5, params=params)
    assert group_wire.task_from_content(over_the_wire(group_wire.task_to_content(task))) == task
    config = TrainConfig(
        output=Path("runs/a"), rollout={"environment_timeout_s": math.inf, "token": "secret", "options": {"a": 1.5}}
    )
    sent = json.loads(json.dumps(config.model_dump(mode="json")))
    assert TrainConfig.model_validate(sent) == config


@pytest.mark.parametrize(
    "error", [EngineUnavailableError("gone", found="it", token=3), MoeReplayError("p", remedy="r")]
)
def test_errors_of_a_worker_keep_their_class(error: MoeReplayError) -> None:
    found = error_from_content(over_the_wire(error_to_content(error)), "worker 1")
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_an_error_that_is_none_of_ours_is_named() -> None:
    found = error_from_content(over_the_wire(error_to_content(KeyError("x"))), "worker 1")
    assert isinstance(found, WorkerError)
    assert "KeyError: 'x'" in str(found)
    assert "In worker 1" in found.__notes__[0]


def test_a_worker_that_is_killed_in_mid_message_has_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    with open(os.devnull, "rb") as file:
        socket.send_fds(theirs, [to_frame({"segment": True})[:-1]], [file.fileno()])
    channel = group_wire.Channel(ours)
    channel.send({"cancel": [1]})  # the system resets a connection with a message that nobody has read
    theirs.close()
    assert channel.receive() is None
    ours.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_segment_that_this_process_has_no_descriptor_left_for_ends_the_run() -> None:
    ours, theirs = socket.socketpair()
    worker: Any = SimpleNamespace(name="rollout worker 1 of 1", channel=group_wire.Channel(ours), groups={})
    pool = WorkerPool(0, {}, (None,))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ours, theirs, open(os.devnull, "rb") as file:
        group_wire.Channel(theirs).send({"segment": True}, file.fileno())
        free = os.dup(file.fileno())
        os.close(free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            pool._read(worker)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises(WorkerError, match=r"rollout worker 1 of 1 cannot be received.*Too many open files"):
        pool.follow_update(1, "")
