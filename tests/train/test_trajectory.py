"""Trajectories: what a session has become, and their way to other ranks."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.engines.session import Session
from moe_replay.errors import EngineError
from moe_replay.records import FinishReason, Sample
from moe_replay.train.learn.batches import make_micro_batch
from moe_replay.train.rollout.groups import check_versions
from moe_replay.train.trajectories.wire import header_of
from tests.support.trajectory_bytes import trajectories_from_bytes, trajectories_to_bytes
from tests.train.trajectories import LAYERS, NUM_EXPERTS, random_mask, random_trajectory


def sample(prompt: np.ndarray, completion: int, version: int, reason: FinishReason) -> Sample:
    """What an engine with weights `version` makes of a prompt."""
    whole = random_trajectory(version, len(prompt), completion, version=version)
    ids = np.concatenate([prompt, whole.token_ids[len(prompt) :]]).astype(np.int32)
    trace = mr.RouteTrace(
        ids, whole.trace.routed_experts, LAYERS, whole.trace.valid, weight_version=version, num_experts=NUM_EXPERTS
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


def test_a_trajectory_says_which_server_has_sampled_which_part() -> None:
    session = Session([5, 6, 7])
    for url in ("http://a", "http://a", "http://b"):
        made = sample(session.token_ids, 2, 1, FinishReason.ABORT)
        session.absorb(dataclasses.replace(made, server=url))
    assert session.finish().servers == ((3, "http://a"), (7, "http://b"))


def test_the_way_to_other_ranks_keeps_everything() -> None:
    sent = [random_trajectory(i, prompt=2, completion=3 + i, observed=i) for i in range(3)]
    sent.append(dataclasses.replace(sent[0], reward=math.nan, advantage=0.1 + 0.2))
    sent.append(dataclasses.replace(sent[1], sampling_mask=random_mask(sent[1], 97)))
    sent.append(dataclasses.replace(sent[2], servers=((2, "http://a:8000"), (5, "http://b:8000"))))
    for before, after in zip(sent, trajectories_from_bytes(trajectories_to_bytes(sent)), strict=True):
        assert (after.row, after.group, after.finish_reason) == (before.row, before.group, before.finish_reason)
        assert after.advantage == before.advantage
        np.testing.assert_equal(after.reward, before.reward)
        assert after.trace == before.trace
        assert after.sampling_mask == before.sampling_mask
        assert after.servers == before.servers
        for name in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
            assert getattr(after, name).dtype == getattr(before, name).dtype


@pytest.mark.parametrize(("prompt", "scored"), [(0, 3), (1, 4), (2, 4)])
def test_a_header_counts_the_tokens_that_have_a_token_before_them(prompt: int, scored: int) -> None:
    trajectory = random_trajectory(0, prompt=prompt, completion=4)
    assert header_of(trajectory).num_scored == scored
    layout = mr.TokenLayout.packed([len(trajectory)])
    assert make_micro_batch([trajectory], [1.0], layout, torch.device("cpu")).target_ids.tolist() == (
        trajectory.token_ids[-scored:].tolist()
    )


def test_nothing_is_sent_as_nothing() -> None:
    assert trajectories_from_bytes(trajectories_to_bytes([])) == []


def test_each_token_of_a_resumed_sequence_keeps_its_version() -> None:
    made = dataclasses.replace(resumed("as_sampled").finish(), row=3, group=1)
    check_versions(made)
    assert made.versions.tolist() == [-1, -1, -1, 1, 1, 1, 1, 2, 2, 2]
    # the last token of version 1 was sampled, but never fed under it: its route is of version 2
    assert made.trace.token_versions[:-1].tolist() == [1, 1, 1, 1, 1, 1, 2, 2, 2]


def test_routes_of_other_weights_than_the_log_probs_are_refused() -> None:
    with pytest.raises(mr.AlignmentError, match=r"routed by other weights.*row 3.*version 1.*as_sampled"):
        check_versions(dataclasses.replace(resumed("latest").finish(), row=3, group=1))


def test_a_version_that_nobody_sampled_with_is_refused() -> None:
    made = random_trajectory(0, prompt=2, completion=4, version=7)
    wrong = dataclasses.replace(made, versions=np.where(made.sampled, 8, -1))
    with pytest.raises(mr.AlignmentError, match="expected routes of weight version 8, found version 7"):
        check_versions(wrong)


def test_a_session_that_never_sampled_is_no_trajectory() -> None:
    with pytest.raises(EngineError, match="not sampled anything"):
        Session([1, 2]).finish()
