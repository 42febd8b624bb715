"""Trajectories: what a session has become, and their way to other ranks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import moe_replay as mr
from moe_replay.errors import EngineError
from moe_replay.rollout.session import Session
from moe_replay.rollout.types import FinishReason, Sample
from moe_replay.train.trajectories.wire import trajectories_from_bytes, trajectories_to_bytes
from moe_replay.train.types import Trajectory
from tests.train.trajectories import LAYERS, NUM_EXPERTS, random_mask, random_trajectory


def sample(prompt: np.ndarray, completion: int, version: int, reason: FinishReason) -> Sample:
    """What an engine with weights `version` makes of a prompt."""
    whole = random_trajectory(version, len(prompt), completion, version=version)
    ids = np.concatenate([prompt, whole.token_ids[len(prompt) :]]).astype(np.int32)
    trace = mr.RouteTrace(
        ids, whole.trace.experts, LAYERS, whole.trace.valid, weight_version=version, num_experts=NUM_EXPERTS
    )
    return Sample(
        prompt_ids=prompt,
        completion_ids=ids[len(prompt) :],
        logprobs=whole.logprobs[len(prompt) :],
        finish_reason=reason,
        trace=trace,
        weight_version=version,
    )


def resumed(keep: str) -> Session:
    """Four tokens by the weights of version 1, then three more by those of version 2."""
    session = Session([5, 6, 7], keep=keep)  # type: ignore[arg-type]
    session.absorb(sample(session.token_ids, 4, 1, FinishReason.ABORT))
    session.absorb(sample(session.token_ids, 3, 2, FinishReason.STOP))
    return session


def test_the_way_to_other_ranks_keeps_everything() -> None:
    sent = [random_trajectory(i, prompt=2, completion=3 + i, observed=i) for i in range(3)]
    sent.append(dataclasses.replace(sent[0], reward=math.nan, advantage=0.1 + 0.2))
    sent.append(dataclasses.replace(sent[1], sampling_mask=random_mask(sent[1], 97)))
    for before, after in zip(sent, trajectories_from_bytes(trajectories_to_bytes(sent)), strict=True):
        assert (after.row, after.group, after.finish_reason) == (before.row, before.group, before.finish_reason)
        assert after.advantage == before.advantage
        np.testing.assert_equal(after.reward, before.reward)
        assert after.trace == before.trace
        assert after.sampling_mask == before.sampling_mask
        for name in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
            assert getattr(after, name).dtype == getattr(before, name).dtype


def test_nothing_is_sent_as_nothing() -> None:
    assert trajectories_from_bytes(trajectories_to_bytes([])) == []


def test_each_token_of_a_resumed_sequence_keeps_its_version() -> None:
    made = Trajectory.of(resumed("as_sampled").finish(), row=3, group=1)
    assert made.versions.tolist() == [-1, -1, -1, 1, 1, 1, 1, 2, 2, 2]
    # the last token of version 1 was sampled, but never fed under it: its route is of version 2
    assert made.trace.token_versions[:-1].tolist() == [1, 1, 1, 1, 1, 1, 2, 2, 2]


def test_routes_of_other_weights_than_the_log_probs_are_refused() -> None:
    with pytest.raises(mr.AlignmentError, match=r"routed by other weights.*row 3.*version 1.*as_sampled"):
        Trajectory.of(resumed("latest").finish(), row=3, group=1)


def test_a_version_that_nobody_sampled_with_is_refused() -> None:
    made = random_trajectory(0, prompt=2, completion=4, version=7)
    wrong = dataclasses.replace(made, versions=np.where(made.sampled, 8, -1))
    with pytest.raises(mr.AlignmentError, match="expected routes of weight version 8, found version 7"):
        wrong.check_versions()


def test_a_session_that_never_sampled_is_no_trajectory() -> None:
    with pytest.raises(EngineError, match="not sampled anything"):
        Trajectory.of(Session([1, 2]).finish(), row=0, group=0)
