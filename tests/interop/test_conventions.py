"""Routes written to each peer's convention, by hand as its code writes them, become the trace that they mean."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_replay import MoeTopology, RouteTrace, interop
from moe_replay.routes import MoeLayer

HYBRID = MoeTopology(5, tuple(MoeLayer(layer, 16, 2) for layer in (1, 3, 4)))
WIDE = MoeTopology(3, tuple(MoeLayer(layer, 300, 3) for layer in (0, 1, 2)))
ONE_EXPERT = MoeTopology(3, tuple(MoeLayer(layer, 4, 1) for layer in (1, 2)))
NO_CHOICE = MoeTopology(3, tuple(MoeLayer(layer, 1, 1) for layer in (1, 2)))


def truth(tokens: int, uncovered: int, of: MoeTopology = HYBRID, seed: int = 0) -> RouteTrace:
    """A trace whose last tokens have no routes; expert 0 is in it, at the places where it is mistaken for nothing."""
    random = np.random.default_rng(seed)
    choices = random.permuted(np.tile(np.arange(of.num_experts), (tokens, len(of.layers), 1)), axis=2)
    experts = choices[..., : of.top_k]
    ids = random.integers(0, 1000, tokens)
    return RouteTrace(ids, experts, of.layers, np.arange(tokens) < tokens - uncovered, 3, num_experts=of.num_experts)


def captured(trace: RouteTrace, of: MoeTopology = HYBRID, rows: int | None = None) -> np.ndarray:
    """(rows, decoder layers, K): what an engine's buffer holds."""
    buffer = np.zeros((len(trace), of.num_layers, of.top_k), np.uint8 if of.num_experts <= 256 else np.uint16)
    for slot, layer in enumerate(of.layers):
        buffer[:, layer] = trace.routed_experts[:, slot]
    return buffer[: len(trace) - 1 if rows is None else rows]


def npy_text(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("of", [HYBRID, WIDE, ONE_EXPERT], ids=["hybrid", "300 experts", "top 1"])
def test_engines(of: MoeTopology) -> None:
    trace = truth(9, 1, of)
    rows = captured(trace, of)
    in_text = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
    ids = trace.token_ids.tolist()
    assert interop.from_vllm(npy_text(rows), ids, of, weight_version=3) == trace
    assert interop.from_vllm(rows, ids, of, weight_version=3) == trace
    assert interop.from_sglang(in_text, ids, of, weight_version=3) == trace
    assert interop.from_slime(in_text, ids, of, weight_version=3) == trace
    assert interop.from_slime(torch.from_numpy(rows.astype(np.int32)), torch.tensor(ids), of, weight_version=3) == trace


def test_rows_that_were_not_asked_for_are_uncovered() -> None:
    trace = truth(9, 1)
    rows = captured(trace)[4:]
    expected = RouteTrace(
        trace.token_ids, trace.routed_experts, trace.layers, [False] * 4 + [True] * 4 + [False], 0, num_experts=16
    )
    assert interop.from_vllm(rows, trace.token_ids, HYBRID, first_token=4) == expected
    in_text = base64.b64encode(rows.astype(np.int32).tobytes()).decode()
    assert interop.from_sglang(in_text, trace.token_ids, HYBRID, first_token=4) == expected


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_verl(jagged: bool, dtype: torch.dtype) -> None:
    # The second sample ends in three tokens of a tool that no turn has read; the third has a route for its last token.
    traces = [truth(7, 1, seed=1), truth(9, 4, seed=2), truth(3, 0, seed=3)]
    parts = [torch.from_numpy(captured(trace, rows=len(trace))).to(dtype) for trace in traces]
    ids = [torch.from_numpy(trace.token_ids.astype(np.int64)) for trace in traces]
    if jagged:
        parts[0] = parts[0][:-1]
        routes, tokens = (torch.nested.as_nested_tensor(p, layout=torch.jagged) for p in (parts, ids))
        assert interop.from_verl(routes, tokens, topology=HYBRID, weight_version=3) == traces
        return
    width, prompts = 14, (4, 2, 1)  # prompts end at column 5, responses begin there
    routes = torch.zeros(3, width, 5, 2, dtype=dtype)
    tokens, mask = torch.full((3, width), 77), torch.zeros(3, width, dtype=torch.int64)
    for sample, prompt in enumerate(prompts):
        columns = slice(5 - prompt, 5 - prompt + len(ids[sample]))
        routes[sample, columns], tokens[sample, columns], mask[sample, columns] = parts[sample], ids[sample], 1
    assert interop.from_verl(routes, tokens, mask, topology=HYBRID, weight_version=3) == traces
    assert torch.equal(interop.to_verl(traces, HYBRID, mask), routes.to(torch.int16))


def test_rows_that_are_turns_of_one_episode() -> None:
    """verl and ms-swift with turns as samples: prompts with a common prefix, each row with its routes."""
    first, second = truth(7, 1, seed=1), truth(9, 1, seed=2)
    ids = np.concatenate([first.token_ids[:4], second.token_ids[4:]])  # the same question
    second = RouteTrace(ids, second.routed_experts, second.layers, second.valid, 3, num_experts=16)
    assert not np.array_equal(first.routed_experts[:4], second.routed_experts[:4])
    rows = [torch.from_numpy(captured(trace, rows=len(trace))) for trace in (first, second)]
    tokens = [first.token_ids, second.token_ids]
    assert interop.from_verl(rows, tokens, topology=HYBRID, weight_version=3) == [first, second]
    read = [interop.from_ms_swift(row, one, HYBRID, weight_version=3) for row, one in zip(rows, tokens, strict=True)]
    assert read == [first, second]


def test_verl_of_layers_that_route_only() -> None:
    trace = truth(6, 1)
    assert interop.from_verl([trace.routed_experts[:-1]], [trace.token_ids], topology=HYBRID, weight_version=3) == [
        trace
    ]


def test_verl_at_top_1_where_zeros_are_a_choice() -> None:
    experts = np.array([[[2], [1]], [[0], [0]], [[0], [0]], [[0], [0]]])
    trace = RouteTrace([5, 6, 7, 8], experts, ONE_EXPERT.layers, [True, True, True, False], num_experts=4)
    assert interop.from_verl([captured(trace, ONE_EXPERT, rows=4)], [[5, 6, 7, 8]], topology=ONE_EXPERT) == [trace]


def test_ms_swift() -> None:
    trace, whole = truth(8, 1), truth(8, 0)
    rows = captured(trace)
    sent = {
        "data": base64.b64encode(rows.tobytes()).decode(),
        "shape": list(rows.shape),
        "dtype": "uint8",
        "__ndarray__": True,
    }
    assert interop.from_ms_swift(sent, trace.token_ids, HYBRID, weight_version=3) == trace
    collated = torch.zeros(1, 8, 5, 2, dtype=torch.int64)
    collated[0, :7] = torch.from_numpy(rows)
    assert interop.from_ms_swift(collated, trace.token_ids, HYBRID, weight_version=3) == trace
    assert interop.from_ms_swift(captured(whole, rows=8), whole.token_ids, HYBRID, weight_version=3) == whole


@pytest.mark.parametrize(("of", "dtype"), [(HYBRID, "uint8"), (WIDE, "int16")])
def test_skyrl(of: MoeTopology, dtype: str) -> None:
    trace = truth(40, 5, of)  # a synthetic end token and an observation at the end
    rows = captured(trace, of, rows=35).astype(dtype)
    sent = {"data": base64.b64encode(rows.tobytes()).decode(), "shape": list(rows.shape), "dtype": dtype}
    assert interop.from_skyrl(sent, trace.token_ids, of, weight_version=3) == trace
    assert interop.to_skyrl(trace, of) == sent


@pytest.mark.parametrize(("of", "dtype"), [(HYBRID, "uint8"), (WIDE, "uint16"), (ONE_EXPERT, "uint8")])
@pytest.mark.parametrize("start", [0, 4])
def test_prime_rl(of: MoeTopology, dtype: str, start: int) -> None:
    trace = truth(9, 1, of)
    rows = captured(trace, of).astype(dtype)[start:]
    sent = {
        "data": base64.b64encode(rows.tobytes()).decode(),
        "shape": list(rows.shape),
        "start": start,
        "dtype": dtype,
    }
    valid = [start <= token < 8 for token in range(9)]
    expected = RouteTrace(trace.token_ids, trace.routed_experts, trace.layers, valid, 3, num_experts=of.num_experts)
    assert interop.from_prime_rl(sent, trace.token_ids, of, weight_version=3) == expected


@pytest.mark.parametrize(
    ("of", "dtype", "uncovered"), [(HYBRID, "uint8", 3), (WIDE, "uint16", 3), (ONE_EXPERT, "uint8", 1)]
)
def test_the_trainer_of_prime_rl(of: MoeTopology, dtype: str, uncovered: int) -> None:
    trace = truth(9, uncovered, of)
    rows = captured(trace, of, rows=9).astype(dtype)
    rows[9 - uncovered :] = 0
    fields = {"data": rows.tobytes(), "shape": [9, of.num_layers, of.top_k], "dtype": dtype}
    for form in (fields, SimpleNamespace(**fields), rows):
        assert interop.from_prime_rl(form, trace.token_ids, of, weight_version=3) == trace
    assert interop.to_prime_rl(trace, of) == fields


@pytest.mark.parametrize(("of", "dtype"), [(HYBRID, np.int8), (WIDE, np.int16)])
@pytest.mark.parametrize("routing_only", [False, True])
def test_nemo_rl(of: MoeTopology, dtype: type, routing_only: bool) -> None:
    full = truth(10, 1, of)
    valid = full.valid[:, 0].copy()
    valid[[3, 4]] = False
    trace = RouteTrace(full.token_ids, full.routed_experts, full.layers, valid, 3, num_experts=of.num_experts)
    rows = captured(full, of, rows=10).astype(dtype)
    if routing_only:
        rows = rows[:, list(of.layers)]
    rows[[3, 4]], rows[9] = -1, np.arange(of.top_k)
    shape = "x".join(map(str, rows.shape))
    envelope = f"nrlre1:{np.dtype(dtype).name}:{shape}:{base64.b64encode(rows.tobytes()).decode()}"
    assert interop.from_nemo_rl(envelope, trace.token_ids, of, weight_version=3) == trace
    assert interop.to_nemo_rl(trace, of, "routing" if routing_only else "decoder") == envelope


@given(
    tokens=st.integers(2, 70),
    uncovered=st.integers(1, 4),
    of=st.sampled_from([HYBRID, WIDE, ONE_EXPERT, NO_CHOICE]),
    seed=st.integers(0, 99),
)
def test_there_and_back(tokens: int, uncovered: int, of: MoeTopology, seed: int) -> None:
    trace = truth(tokens, min(uncovered, tokens - 1), of, seed)
    ids = trace.token_ids
    assert interop.from_skyrl(interop.to_skyrl(trace, of), ids, of, weight_version=3) == trace
    if tokens > 2:
        assert interop.from_nemo_rl(interop.to_nemo_rl(trace, of), ids, of, weight_version=3) == trace
    if of.top_k > 1:
        assert interop.from_prime_rl(interop.to_prime_rl(trace, of), ids, of, weight_version=3) == trace
        assert interop.from_verl(interop.to_verl([trace], of), [ids], topology=of, weight_version=3) == [trace]
    trace = truth(tokens, 1, of, seed)
    ids = trace.token_ids
    assert interop.from_vllm(interop.to_vllm(trace, of), ids, of, weight_version=3) == trace
    assert interop.from_sglang(interop.to_sglang(trace, of), ids, of, weight_version=3) == trace
    assert interop.from_slime(interop.to_slime(trace, of), ids, of, weight_version=3) == trace
    assert interop.from_ms_swift(interop.to_ms_swift(trace, of), ids, of, weight_version=3) == trace
    assert interop.from_verl(interop.to_verl([trace], of), [ids], topology=of, weight_version=3) == [trace]


def test_zeros_are_routes_where_there_is_one_expert() -> None:
    trace = truth(70, 1, NO_CHOICE)
    assert interop.from_vllm(captured(trace, NO_CHOICE), trace.token_ids, NO_CHOICE, weight_version=3) == trace


def test_verl_of_samples_without_rows() -> None:
    rows, no_ids = np.zeros((0, 5, 2), np.int16), np.zeros(0, np.int64)
    short, empty = interop.from_verl([rows, rows], [[7], no_ids], topology=HYBRID)
    assert (short.token_ids.tolist(), short.covered_fraction, len(empty)) == ([7], 0.0, 0)
    routes, mask = torch.zeros(2, 4, 5, 2, dtype=torch.int16), torch.zeros(2, 4)
    assert [len(t) for t in interop.from_verl(routes, torch.ones(2, 4).long(), mask, topology=HYBRID)] == [0, 0]
    assert torch.equal(interop.to_verl([empty, empty], HYBRID, mask), routes)
    assert interop.from_verl(routes[:0], mask[:0].long(), mask[:0], topology=HYBRID) == []
    assert interop.to_verl([], HYBRID, mask[:0]).shape == (0, 4, 5, 2)


def test_a_sample_of_verl_may_be_without_routes_where_the_caller_says_so() -> None:
    rows = np.zeros((3, 5, 2), np.int16)
    with pytest.raises(interop.RouteFormatError, match="all-zero"):
        interop.from_verl([rows], [[7, 8, 9]], topology=HYBRID, may_be_empty=[False])
    (empty,) = interop.from_verl([rows], [[7, 8, 9]], topology=HYBRID, may_be_empty=[True])
    assert (len(empty), empty.covered_fraction) == (3, 0.0)
    trace = truth(6, 3, HYBRID)
    routed, ids = interop.to_verl([trace], HYBRID), [trace.token_ids]
    assert interop.from_verl(routed, ids, topology=HYBRID, weight_version=3, may_be_empty=[True]) == [trace]
