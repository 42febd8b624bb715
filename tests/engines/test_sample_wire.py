"""Samples survive the way from server to trainer, and nothing that was harmed on it is believed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_replay as mr
from moe_replay.engines.server.sample_wire import decode_samples, encode_samples
from moe_replay.errors import EngineError
from moe_replay.records import FinishReason, Sample

LAYERS, EXPERTS, TOP_K = (1, 2, 5), 8, 2


def sample(prompt: np.ndarray, tokens: int, seed: int, prompt_seed: int = 0, num_experts: int = EXPERTS) -> Sample:
    def routes(rows: int, number: int) -> np.ndarray:
        every = np.tile(np.arange(num_experts), (rows * len(LAYERS), 1))
        return np.random.default_rng(number).permuted(every, axis=1)[:, :TOP_K].reshape(rows, len(LAYERS), TOP_K)

    random = np.random.default_rng(seed)
    completion = random.integers(0, 1000, tokens)
    experts = np.concatenate([routes(len(prompt), prompt_seed), routes(tokens, seed)])
    valid = np.arange(len(experts)) < len(experts) - 1
    trace = mr.RouteTrace(np.concatenate([prompt, completion]), experts, LAYERS, valid, 4, num_experts=num_experts)
    return Sample(
        prompt_ids=trace.token_ids[: len(prompt)],
        completion_ids=trace.token_ids[len(prompt) :],
        logprobs=random.standard_normal(tokens).astype(np.float32),
        finish_reason=list(FinishReason)[seed % 3],
        trace=trace,
        weight_version=4,
        info={"seed": str(seed)},
    )


def assert_equal(one: Sample, other: Sample) -> None:
    assert one.trace == other.trace
    assert one.finish_reason is other.finish_reason
    assert (one.weight_version, one.info) == (other.weight_version, other.info)
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@settings(max_examples=50)
@given(
    prompt=st.lists(st.integers(0, 1000), min_size=1, max_size=40),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    num_experts=st.sampled_from([8, 300]),
)
def test_samples_come_back_as_they_went(prompt, lengths, num_experts) -> None:
    sent = [sample(np.array(prompt), length, seed, num_experts=num_experts) for seed, length in enumerate(lengths)]
    arrived = decode_samples(encode_samples(sent))
    assert len(arrived) == len(sent)
    for one, other in zip(sent, arrived, strict=True):
        assert_equal(one, other)


def test_the_prompt_travels_once() -> None:
    prompt = np.arange(1000)
    group = [sample(prompt, 5, seed) for seed in range(8)]
    routes_of_prompt = len(prompt) * len(LAYERS) * TOP_K
    alone, together = len(encode_samples(group[:1])), len(encode_samples(group))
    assert together - alone < 7 * 1000
    assert alone < routes_of_prompt + 4 * len(prompt) + 1000


def test_a_prompt_that_was_routed_otherwise_brings_its_own_routes() -> None:
    group = [sample(np.arange(50), 3, 1), sample(np.arange(50), 3, 2, prompt_seed=9), sample(np.arange(50), 3, 3)]
    for one, other in zip(group, decode_samples(encode_samples(group)), strict=True):
        assert_equal(one, other)


def test_a_row_that_names_an_expert_twice_is_refused_before_it_is_replayed() -> None:
    good = sample(np.arange(5), 3, 1)
    experts = good.trace.routed_experts.copy()
    experts[6, 1] = experts[6, 1, 0]
    twice = mr.RouteTrace.from_parts(good.trace.parts._replace(routed_experts=experts))
    (arrived,) = decode_samples(encode_samples([replace(good, trace=twice)]))
    with pytest.raises(mr.errors.TraceError, match="an expert occurs twice in one row") as error:
        mr.RouteBatch.from_traces([arrived.trace], mr.TokenLayout.packed([len(arrived.trace)]))
    assert (error.value.token, error.value.layer) == (6, LAYERS[1])


def test_every_cut_is_found() -> None:
    data = encode_samples([sample(np.arange(5), 3, seed) for seed in range(2)])
    for end in range(len(data)):
        with pytest.raises((mr.errors.TraceFormatError, EngineError)):
            decode_samples(data[:end])
    with pytest.raises(mr.errors.TraceFormatError, match="after the last sample"):
        decode_samples(data + b"x")


def test_no_changed_byte_changes_a_sample() -> None:
    sent = [sample(np.arange(5), 3, seed) for seed in range(2)]
    data = encode_samples(sent)
    head = int.from_bytes(data[:4], "little") + 4
    for position in range(head, len(data)):
        harmed = bytearray(data)
        harmed[position] ^= 0x10
        with pytest.raises(mr.errors.TraceFormatError):
            decode_samples(harmed)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00{}", b"\x04\x00\x00\x00null"])
def test_what_are_no_samples(data: bytes) -> None:
    with pytest.raises(mr.errors.TraceFormatError):
        decode_samples(data)
