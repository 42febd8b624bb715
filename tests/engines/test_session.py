"""Trajectories of several turns, with tools, aborts and new weights in between."""

from __future__ import annotations

import asyncio
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from moe_replay.engines.session import Session
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineError, TraceError
from moe_replay.records import NOT_SAMPLED, FinishReason, Sample, SamplingParams, Trajectory
from moe_replay.weights.checkpoint import checkpoint_tensors
from tests.engines.tiny import reference, tiny_model

PROMPT, TOOL = [5, 6, 7, 8], [11, 12, 13]
TURN = SamplingParams(max_tokens=6, seed=3)


@cache
def weights(version: int) -> nn.Module:
    return tiny_model("qwen3_moe", seed=version)


@pytest.fixture
def engine() -> TransformersEngine:
    return TransformersEngine(tiny_model("qwen3_moe", seed=0))


def update(engine: TransformersEngine, version: int) -> None:
    engine.update_weights(checkpoint_tensors(weights(version)), version)


def turn(session: Session, engine: TransformersEngine, params: SamplingParams = TURN) -> FinishReason:
    return asyncio.run(session.generate(engine, params))


def sets(experts: np.ndarray) -> np.ndarray:
    return np.sort(experts, axis=-1)


def assert_routed_by(session: Session, version: int, tokens: slice) -> None:
    """These tokens have the routes and the version of a pass of these weights over the whole sequence."""
    assert session.trace is not None
    expected = reference(weights(version), session.token_ids).trace
    np.testing.assert_array_equal(sets(session.trace.routed_experts[tokens]), sets(expected.routed_experts[tokens]))
    assert session.trace.valid[tokens].all()
    assert set(session.trace.token_versions[tokens].tolist()) == {version}


@pytest.mark.parametrize("keep", ["as_sampled", "latest"])
def test_two_turns_with_a_tool_and_new_weights_between(engine: TransformersEngine, keep) -> None:
    session = Session(PROMPT, keep)
    assert turn(session, engine) is FinishReason.LENGTH
    first = len(session)
    assert first == len(PROMPT) + 6
    assert session.trace is not None
    assert not session.trace.valid[-1].any()

    session.observe(TOOL)
    assert not session.trace.valid[first - 1 :].any()
    update(engine, 1)
    turn(session, engine)
    assert len(session) == first + len(TOOL) + 6 == len(session.trace)

    # the last token of the first turn was sampled by the old weights, but first read by the new ones
    read_anew = first - 1
    assert_routed_by(session, 0 if keep == "as_sampled" else 1, slice(0, read_anew))
    assert_routed_by(session, 1, slice(read_anew, len(session) - 1))
    assert not session.trace.valid[-1].any()
    assert session.sampled_versions.tolist() == [NOT_SAMPLED] * 4 + [0] * 6 + [NOT_SAMPLED] * 3 + [1] * 6
    assert session.sampled.sum() == 12


def test_log_probs_are_those_of_the_weights_that_sampled(engine: TransformersEngine) -> None:
    session = Session(PROMPT)
    turn(session, engine)
    session.observe(TOOL)
    update(engine, 1)
    turn(session, engine)
    for version in (0, 1):
        mine = session.sampled_versions == version
        expected = np.concatenate([[0], reference(weights(version), session.token_ids).logprobs])
        np.testing.assert_allclose(session.logprobs[mine], expected[mine], atol=1e-4)
    assert not session.logprobs[~session.sampled].any()


class AbortsAfter:
    """An engine whose first answer is cut off, as by an abort."""

    def __init__(self, engine: TransformersEngine, tokens: int) -> None:
        self.engine = engine
        self.tokens = tokens
        self.asked: list[SamplingParams] = []

    async def generate_one(self, prompt: list[int], params: SamplingParams) -> list[Sample]:
        self.asked.append(params)
        (sample,) = await self.engine.generate_one(prompt, params)
        if len(self.asked) > 1:
            return [sample]
        whole = len(prompt) + self.tokens
        trace = sample.trace[: whole - 1].append_tokens(sample.trace.token_ids[whole - 1 : whole])
        return [
            Sample(
                prompt_ids=sample.prompt_ids,
                completion_ids=sample.completion_ids[: self.tokens],
                logprobs=sample.logprobs[: self.tokens],
                finish_reason=FinishReason.ABORT,
                trace=trace,
                weight_version=sample.weight_version,
            )
        ]


def test_an_aborted_turn_is_resumed_with_newer_weights(engine: TransformersEngine) -> None:
    session, aborting = Session(PROMPT), AbortsAfter(engine, tokens=4)
    assert turn(session, aborting, SamplingParams(max_tokens=10, seed=1)) is FinishReason.ABORT  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="middle of a turn"):
        session.observe(TOOL)
    update(engine, 1)
    assert turn(session, aborting, SamplingParams(max_tokens=10, seed=1)) is FinishReason.LENGTH  # type: ignore[arg-type]
    assert [asked.max_tokens for asked in aborting.asked] == [10, 6]
    assert aborting.asked[0].seed != aborting.asked[1].seed
    assert session.sampled_versions.tolist() == [NOT_SAMPLED] * 4 + [0] * 4 + [1] * 6
    assert_routed_by(session, 0, slice(0, 7))
    assert_routed_by(session, 1, slice(7, len(session) - 1))


def test_a_sample_of_other_tokens_is_refused(engine: TransformersEngine) -> None:
    session = Session(PROMPT)
    ((sample,),) = engine.generate([[9, 9]], TURN)
    with pytest.raises(EngineError, match="another sequence"):
        session.absorb(sample)
    assert session.trace is None


def test_routes_of_another_model_are_refused(engine: TransformersEngine) -> None:
    session = Session(PROMPT)
    turn(session, engine)
    other = TransformersEngine(tiny_model("mixtral"))
    with pytest.raises(TraceError, match="different routers"):
        turn(session, other)


def test_a_session_is_one_trajectory(engine: TransformersEngine) -> None:
    with pytest.raises(EngineError, match="one sequence"):
        turn(Session(PROMPT), engine, SamplingParams(n=2))


def test_a_trajectory_can_be_replayed_by_the_trainer(engine: TransformersEngine) -> None:
    import moe_replay as mr

    session = Session(PROMPT)
    turn(session, engine)
    session.observe(TOOL)
    turn(session, engine)
    model = tiny_model("qwen3_moe", seed=5)
    replay = mr.attach(model)
    batch = mr.RouteBatch.from_traces([session.trace], mr.TokenLayout.padded([len(session)]))
    with replay.replay(batch):
        logits = model(input_ids=torch.tensor(session.token_ids[None], dtype=torch.long)).logits
    assert logits.shape[1] == len(session)


def test_a_finished_session_is_one_record_of_its_tokens(engine: TransformersEngine) -> None:
    session = Session(PROMPT)
    turn(session, engine)
    session.observe(TOOL)
    update(engine, 1)
    turn(session, engine)
    sequence = session.finish()
    tokens = len(PROMPT) + 6 + len(TOOL) + 6
    assert len(sequence) == len(sequence.trace) == tokens
    np.testing.assert_array_equal(sequence.token_ids, session.token_ids)
    np.testing.assert_array_equal(sequence.logprobs, session.logprobs)
    assert sequence.versions.tolist() == [NOT_SAMPLED] * 4 + [0] * 6 + [NOT_SAMPLED] * 3 + [1] * 6
    np.testing.assert_array_equal(np.flatnonzero(sequence.sampled), [*range(4, 10), *range(13, 19)])
    assert sequence.finish_reason is FinishReason.LENGTH

    session.observe(TOOL)  # the session grows on, the record does not
    assert len(sequence.token_ids) == len(sequence.trace) == tokens


def test_a_session_that_never_sampled_cannot_be_finished() -> None:
    with pytest.raises(EngineError, match="not sampled anything"):
        Session(PROMPT).finish()


def test_a_sequence_has_one_entry_per_token_and_a_trace_of_its_own_tokens(engine: TransformersEngine) -> None:
    session = Session(PROMPT)
    turn(session, engine)
    sequence = session.finish()
    fields = {name: getattr(sequence, name) for name in ("token_ids", "logprobs", "versions", "trace", "finish_reason")}
    for name in ("logprobs", "versions", "trace"):
        with pytest.raises(EngineError, match="one entry per token"):
            Trajectory(**fields | {name: fields[name][:-1]})
    with pytest.raises(EngineError, match="other tokens"):
        Trajectory(**fields | {"token_ids": fields["token_ids"] + 1})
