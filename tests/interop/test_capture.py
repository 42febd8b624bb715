"""Captures become traces, and every way in which engines have been wrong is an error with its cause."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.errors import EngineError
from moe_replay.interop.capture import EngineName, trace_from_capture
from moe_replay.routes.topology import ATTENTION_ROUTER, MoeLayer, MoeTopology

ENGINE = EngineName("vLLM", "0.30.0")


def topology(moe: tuple[int, ...] = (1, 2, 3), depth: int = 4, experts: int = 8, top_k: int = 2) -> MoeTopology:
    return MoeTopology(depth, tuple(MoeLayer(layer, experts, top_k) for layer in moe))


def captured(rows: int, of: MoeTopology | None = None, seed: int = 0, dtype: type = np.uint8) -> np.ndarray:
    """(rows, decoder layers, K) as an engine reports it: zeros in dense layers."""
    of = of or topology()
    random = np.random.default_rng(seed)
    routes = np.zeros((rows, of.num_layers, of.top_k), dtype)
    for layer in of.layers:
        if layer < of.num_layers:
            choices = random.permuted(np.tile(np.arange(of.num_experts), (rows, 1)), axis=1)
            routes[:, layer] = choices[:, : of.top_k]
    return routes


@given(
    tokens=st.integers(2, 40),
    short=st.booleans(),
    first=st.integers(0, 39),
    moe=st.sets(st.integers(0, 5), min_size=1).map(lambda layers: tuple(sorted(layers))),
    dtype=st.sampled_from([np.uint8, np.uint16, np.int32]),
)
def test_each_route_goes_to_its_token_and_layer(tokens, short, first, moe, dtype) -> None:
    first = min(first, tokens - 1)
    shape = topology(moe, depth=6)
    rows = tokens - first - short
    raw = captured(rows, shape, seed=tokens, dtype=dtype)
    trace = trace_from_capture(raw, range(100, 100 + tokens), shape, ENGINE, weight_version=7, first_token=first)
    assert trace.layers == moe
    assert trace.num_experts == 8
    assert [span.version for span in trace.versions] == [7]
    for slot, layer in enumerate(moe):
        np.testing.assert_array_equal(trace.routed_experts[first : first + rows, slot], raw[:, layer])
    np.testing.assert_array_equal(trace.valid.all(axis=1), [first <= t < first + rows for t in range(tokens)])


def test_routers_in_the_attention_are_declared_as_not_recorded() -> None:
    both = topology((0, 1, ATTENTION_ROUTER, ATTENTION_ROUTER + 1), depth=2)
    trace = trace_from_capture(captured(4, both), range(4), both, ENGINE)
    assert trace.layers == both.layers
    assert trace.valid.any(axis=0).tolist() == [True, True, False, False]


def fails(raw: np.ndarray, tokens: int, of: MoeTopology | None = None, **more) -> EngineError:
    with pytest.raises(EngineError) as caught:
        trace_from_capture(raw, range(tokens), of or topology(), ENGINE, sample=3, **more)
    assert "vLLM 0.30.0" in str(caught.value)
    assert caught.value.sample == 3
    return caught.value


def test_an_all_zero_capture() -> None:
    error = fails(np.zeros((9, 4, 2), np.uint8), 10)
    assert "all-zero capture" in error.problem
    assert "never bound" in str(error)
    assert error.found == "zeros in 27 of 27 (token, layer) rows"


def test_an_all_zero_capture_at_top_1() -> None:
    one = topology(top_k=1)
    assert "all-zero capture" in fails(np.zeros((99, 4, 1), np.uint8), 100, one).problem
    few = trace_from_capture(np.zeros((3, 4, 1), np.uint8), range(4), one, ENGINE)  # can be a choice
    assert few.routed_experts.sum() == 0


def test_a_layer_that_was_never_captured() -> None:
    raw = captured(9)
    raw[:, 2] = 0
    error = fails(raw, 10)
    assert error.layer == 2
    assert "never captured layer 2" in error.problem


def test_a_prompt_that_was_never_captured() -> None:
    raw = captured(9)
    raw[:5] = 0
    error = fails(raw, 10)
    assert "first 5 rows" in error.problem
    assert "Prompt rows" in str(error)
    assert (error.token, error.layer) == (0, 1)


def test_rows_in_the_middle_that_were_never_captured() -> None:
    raw = captured(9)
    raw[4:6] = 0
    error = fails(raw, 12, first_token=2)
    assert "left rows of the capture unwritten" in error.problem
    assert error.token == 6  # of the sequence, not of the capture


def test_routes_in_a_dense_layer() -> None:
    raw = captured(9)
    raw[7, 0] = [3, 1]
    error = fails(raw, 10)
    assert (error.layer, error.token, error.found) == (0, 7, [3, 1])
    assert "draft (MTP)" in str(error)


def test_a_layer_axis_that_is_shifted() -> None:
    assert fails(np.roll(captured(9), -1, axis=1), 10).layer == 0


def test_ids_beyond_the_experts() -> None:
    raw = captured(9)
    raw[4, 2, 1] = 8
    error = fails(raw, 10)
    assert (error.layer, error.token) == (2, 4)
    assert "physical copies" in str(error)


def test_negative_ids() -> None:
    raw = captured(9, dtype=np.int32)
    raw[4, 2] = -1
    assert "out of range" in fails(raw, 10).problem


def test_an_expert_twice_in_a_row() -> None:
    raw = captured(9)
    raw[4, 3] = [5, 5]
    error = fails(raw, 10)
    assert (error.layer, error.token, error.found) == (3, 4, [5, 5])
    assert "twice" in error.problem


@pytest.mark.parametrize(("depth", "cause"), [(3, "MoE layers only"), (5, "draft (MTP)"), (2, "one pipeline stage")])
def test_another_number_of_layers(depth: int, cause: str) -> None:
    raw = np.ones((9, depth, 2), np.uint8)
    error = fails(raw, 10)
    assert "number of layers" in error.problem
    assert error.found == depth
    assert cause in str(error)


def test_another_top_k() -> None:
    assert "experts per token" in fails(captured(9)[..., :1], 10).problem


@pytest.mark.parametrize(
    ("rows", "problem", "cause"),
    [(8, "fewer", "routed_experts_prompt_start"), (0, "fewer", "did not ask"), (11, "more", "resumed request")],
)
def test_another_number_of_rows(rows: int, problem: str, cause: str) -> None:
    error = fails(captured(rows), 10)
    assert f"{problem} rows than tokens" in error.problem
    assert cause in str(error)


@pytest.mark.parametrize("raw", [np.zeros((9, 4), np.uint8), np.zeros((9, 4, 2), np.float32)])
def test_no_routes_at_all(raw: np.ndarray) -> None:
    assert "something else than routes" in fails(raw, 10).problem
