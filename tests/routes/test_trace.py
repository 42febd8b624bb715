"""A trace against a list of its tokens: (id, weight version, {layer: experts that were recorded})."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.errors import TraceError
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.trace import RouteTrace, first_duplicate
from moe_replay.routes.trace_parts import VersionSpan, narrowest_dtype
from tests.routes.parts import trace_from_parts

LAYERS = (1, 2, 4)
TOP_K = 2


@dataclass(frozen=True)
class Token:
    """One token as a reader would write it down."""

    id: int
    version: int
    routes: dict[int, tuple[int, ...]]  # only the layers that were recorded


tokens = st.builds(
    Token,
    id=st.integers(0, 3),  # few, so that different sequences often begin alike
    version=st.integers(0, 2),
    routes=st.dictionaries(
        st.sampled_from(LAYERS),
        st.sampled_from([(0, 1), (1, 0), (3, 2), (7, 5)]),
        max_size=len(LAYERS),
    ),
)
sequences = st.lists(tokens, max_size=8)


def trace_of(sequence: list[Token], layers: tuple[int, ...] = LAYERS, num_experts: int | None = 8) -> RouteTrace:
    experts = np.zeros((len(sequence), len(layers), TOP_K), int)
    valid = np.zeros((len(sequence), len(layers)), bool)
    for position, token in enumerate(sequence):
        for slot, layer in enumerate(layers):
            if layer in token.routes:
                experts[position, slot], valid[position, slot] = token.routes[layer], True
    versions = [(i, token.version) for i, token in enumerate(sequence)] or 0
    return RouteTrace([t.id for t in sequence], experts, layers, valid, versions, num_experts=num_experts)


def tokens_of(trace: RouteTrace) -> list[Token]:
    read = []
    for position in range(len(trace)):
        recorded = [slot for slot in range(len(trace.layers)) if trace.valid[position, slot]]
        routes = {trace.layers[slot]: tuple(trace.routed_experts[position, slot].tolist()) for slot in recorded}
        read.append(Token(int(trace.token_ids[position]), int(trace.token_versions[position]), routes))
    return read


def check_sound(trace: RouteTrace) -> None:
    """What is true of every trace, however it was made."""
    starts = [span.start for span in trace.versions]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert starts[-1] < max(len(trace), 1)
    versions = [span.version for span in trace.versions]
    assert all(a != b for a, b in pairwise(versions))
    assert not trace.routed_experts[~trace.valid].any()
    assert trace.routed_experts.flags.c_contiguous
    for array in (trace.token_ids, trace.routed_experts, trace.valid):
        assert not array.flags.writeable


# ---- parts -----------------------------------------------------------------------------------------------------------


@given(sequences)
def test_a_trace_holds_what_it_was_made_from(sequence: list[Token]) -> None:
    trace = trace_of(sequence)
    assert tokens_of(trace) == sequence
    assert len(trace) == len(sequence)
    pairs = len(sequence) * len(LAYERS)
    covered = sum(len(token.routes) for token in sequence) / pairs if pairs else 0.0
    assert trace.covered_fraction == pytest.approx(covered)
    check_sound(trace)


@given(sequences, st.integers(-10, 10) | st.none(), st.integers(-10, 10) | st.none())
def test_a_slice_is_the_slice_of_its_tokens(sequence: list[Token], start: int | None, stop: int | None) -> None:
    part = trace_of(sequence)[start:stop]
    assert tokens_of(part) == sequence[start:stop]
    check_sound(part)
    if sequence[start:stop]:
        assert part == trace_of(sequence[start:stop])


@given(sequences, st.lists(st.sampled_from(LAYERS), min_size=1, unique=True).map(sorted))
def test_selected_layers_are_those_of_the_whole(sequence: list[Token], layers: list[int]) -> None:
    part = trace_of(sequence).select_layers(layers)
    assert part == trace_of(sequence, tuple(layers))
    check_sound(part)


@given(sequences, st.lists(st.integers(0, 6), max_size=3))
def test_uncaptured_layers_are_there_and_uncovered(sequence: list[Token], added: list[int]) -> None:
    more = trace_of(sequence).with_uncaptured_layers(added)
    assert more.layers == tuple(sorted({*LAYERS, *added}))
    assert tokens_of(more) == sequence
    check_sound(more)


# ---- growing ---------------------------------------------------------------------------------------------------------


@given(sequences, sequences)
def test_extending_is_concatenation(first: list[Token], second: list[Token]) -> None:
    joined = trace_of(first).extend(trace_of(second))
    assert tokens_of(joined) == first + second
    check_sound(joined)


@given(sequences, st.integers(0, 8))
def test_cut_and_joined_is_the_same(sequence: list[Token], at: int) -> None:
    trace = trace_of(sequence)
    assert trace[:at].extend(trace[at:]) == trace


@given(sequences, st.lists(st.integers(0, 9), max_size=4), st.none() | st.integers(0, 5))
def test_appended_tokens_are_uncovered(sequence: list[Token], ids: list[int], version: int | None) -> None:
    longer = trace_of(sequence).append_tokens(ids, version)
    inherited = sequence[-1].version if sequence else 0
    assert tokens_of(longer) == sequence + [Token(i, inherited if version is None else version, {}) for i in ids]
    check_sound(longer)


@given(sequences, sequences, st.data())
def test_a_resumed_rollout_keeps_or_renews_its_routes(
    first: list[Token], rest: list[Token], data: st.DataObject
) -> None:
    """The engine sees the whole sequence again: the same ids, with routes and versions of its own."""
    again = [data.draw(tokens) for _ in first]
    later = [Token(was.id, now.version, now.routes) for was, now in zip(first, again, strict=True)]
    kept, renewed = [], []
    for was, now in zip(first, later, strict=True):
        kept_version = was.version if was.routes or not now.routes else now.version
        kept.append(Token(was.id, kept_version, now.routes | was.routes))
        renewed.append(Token(was.id, now.version if now.routes else was.version, was.routes | now.routes))
    ways: dict[Literal["as_sampled", "latest"], list[Token]] = {"as_sampled": kept, "latest": renewed}
    for way, expected in ways.items():
        resumed = trace_of(first).continued_by(trace_of(later + rest), way)
        assert tokens_of(resumed) == expected + rest
        check_sound(resumed)
    assert trace_of(first).continued_by(trace_of(later + rest)) == trace_of(first).continued_by(
        trace_of(later + rest), "as_sampled"
    )


@given(sequences, sequences)
def test_only_the_same_tokens_can_be_resumed(first: list[Token], later: list[Token]) -> None:
    ids, later_ids = [t.id for t in first], [t.id for t in later]
    if later_ids[: len(ids)] == ids:
        assert len(trace_of(first).continued_by(trace_of(later))) == len(later)
        return
    with pytest.raises(TraceError, match="does not begin with this trace's tokens") as caught:
        trace_of(first).continued_by(trace_of(later))
    place = next(i for i in range(len(ids)) if later_ids[i : i + 1] != [ids[i]])
    assert caught.value.token == place
    assert caught.value.expected == f"token id {ids[place]}"
    ended = place >= len(later)
    assert caught.value.found == ("the end of the sequence" if ended else f"token id {later_ids[place]}")


# ---- merging what ranks recorded -------------------------------------------------------------------------------------


@given(sequences, st.data())
def test_shards_merge_to_the_whole(sequence: list[Token], data: st.DataObject) -> None:
    """Each recorded (token, layer) goes to one or more of three ranks; each rank knows some of the layers."""
    ranks = [
        data.draw(st.lists(st.sampled_from(LAYERS), min_size=1, unique=True).map(sorted).map(tuple)) for _ in range(2)
    ]
    ranks.append(LAYERS)
    shards: list[list[Token]] = [[] for _ in ranks]
    for token in sequence:
        held = {layer: data.draw(st.integers(1, 7)) for layer in token.routes}
        for number, (shard, layers) in enumerate(zip(shards, ranks, strict=True)):
            last = number == len(ranks) - 1  # the last rank holds what nobody else does
            routes = {
                layer: route
                for layer, route in token.routes.items()
                if layer in layers and (held[layer] >> number & 1 or last)
            }
            shard.append(Token(token.id, token.version, routes))
    traces = [trace_of(shard, layers) for shard, layers in zip(shards, ranks, strict=True)]
    assert RouteTrace.merge(data.draw(st.permutations(traces))) == trace_of(sequence)


def test_shards_that_contradict_each_other_are_refused() -> None:
    one = RouteTrace([5, 6], [[[0, 1]], [[2, 3]]], [4], num_experts=8)
    other = RouteTrace([5, 6], [[[0, 1]], [[3, 2]]], [4], num_experts=8)
    problem = r"different routes for one token \[layer 4, token 1\]: expected \[2, 3\], found \[3, 2\]"
    with pytest.raises(TraceError, match=problem):
        RouteTrace.merge([one, other])
    with pytest.raises(TraceError, match=r"different routes.* expected \[2, 3\], found \[2, 5\]"):
        RouteTrace.merge([one, RouteTrace([5, 6], [[[0, 1]], [[2, 5]]], [4], num_experts=8)])
    with pytest.raises(TraceError, match="nothing to merge"):
        RouteTrace.merge([])


ONE = RouteTrace([5, 6], [[[0, 1]], [[2, 3]]], [4], num_experts=8)
STRANGERS = {
    "other tokens": RouteTrace([5, 7], [[[0, 1]], [[2, 3]]], [4], num_experts=8),
    "fewer tokens": ONE[:1],
    "other top_k": RouteTrace([5, 6], [[[0]], [[2]]], [4], num_experts=8),
    "other experts": RouteTrace([5, 6], [[[0, 1]], [[2, 3]]], [4], num_experts=9),
    "other weights": RouteTrace([5, 6], [[[0, 1]], [[2, 3]]], [4], weight_version=1, num_experts=8),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_only_shards_of_one_pass_merge(name: str) -> None:
    with pytest.raises(TraceError, match=r"can be merged \[sample shard 1\]: expected RouteTrace\(2 tokens"):
        RouteTrace.merge([ONE, STRANGERS[name]])


OTHER_ROUTERS = {
    "layers [3], top 2 of 8": RouteTrace([5, 6], [[[0, 1]], [[2, 3]]], [3], num_experts=8),
    "layers [4], top 1 of 8": STRANGERS["other top_k"],
    "layers [4], top 2 of 9": STRANGERS["other experts"],
}


@pytest.mark.parametrize("routers", OTHER_ROUTERS)
def test_traces_of_different_routers_do_not_join(routers: str) -> None:
    problem = re.escape(f"cannot be joined: expected layers [4], top 2 of 8, found {routers}")
    for join in (ONE.extend, ONE.continued_by):
        with pytest.raises(TraceError, match=problem):
            join(OTHER_ROUTERS[routers])


def test_the_number_of_experts_is_forgotten_where_only_one_part_knows_it() -> None:
    unknown = RouteTrace([5], [[[200, 300]]], [4])
    joined = ONE.extend(unknown)
    assert joined.num_experts is None
    assert joined.routed_experts[:, 0].tolist() == [[0, 1], [2, 3], [200, 300]]


# ---- what a trace may hold -------------------------------------------------------------------------------------------


def test_ids_rest_in_the_narrowest_dtype() -> None:
    assert (narrowest_dtype(256), narrowest_dtype(257)) == (np.uint8, np.uint16)
    assert RouteTrace([1], [[[255]]], [0]).routed_experts.dtype == np.uint8
    assert RouteTrace([1], [[[256]]], [0]).routed_experts.dtype == np.uint16
    assert RouteTrace([1], [[[3]]], [0], num_experts=300).routed_experts.dtype == np.uint16


def test_the_callers_arrays_stay_the_callers() -> None:
    ids, experts, valid = np.array([1, 2], np.int32), np.array([[[1]], [[2]]], np.uint8), np.array([[True], [False]])
    trace = RouteTrace(ids, experts, [0], valid)
    ids[:], experts[:], valid[:] = 9, 9, True
    assert tokens_of(trace) == [Token(1, 0, {0: (1,)}), Token(2, 0, {})]


def test_what_is_not_valid_may_hold_anything_and_becomes_zero() -> None:
    trace = RouteTrace([1, 2], [[[-1, -1]], [[1, 0]]], [0], [False, True], num_experts=4)
    assert trace.routed_experts.tolist() == [[[0, 0]], [[1, 0]]]


ANYTHING: Any = 1.5  # what no type checker would let pass
REFUSED = {
    "one row short": (lambda: RouteTrace([1, 2], [[[0]]], [0]), r"\(tokens=2, layers=1, top_k\), found \(1, 1, 1\)"),
    "layers shifted": (lambda: RouteTrace([1], [[[0], [1]]], [0]), r"layers=1, top_k\), found \(1, 2, 1\)"),
    "no experts": (lambda: RouteTrace([1], [[[]]], [0]), "wrong shape"),
    "negative id": (
        lambda: RouteTrace([1, 1], [[[0]], [[-1]]], [7]),
        r"\[layer 7, token 1\].*found \[-1\].*valid=False",
    ),
    "beyond the experts": (lambda: RouteTrace([1], [[[8, 1]]], [7], num_experts=8), r"\[layer 7, token 0\]: .*0 to 7"),
    "beyond any model": (lambda: RouteTrace([1], [[[32768]]], [7]), "0 to 32767"),
    "fractions": (lambda: RouteTrace([1], [[[ANYTHING]]], [7]), "must be integers"),
    "fewer experts than top_k": (lambda: RouteTrace([1], [[[0, 1]]], [7], num_experts=1), "impossible number"),
    "twice in a row": (lambda: RouteTrace([1], [[[3, 3]]], [7]), r"twice in one row \[layer 7, token 0\].*\[3, 3\]"),
    "padding": (lambda: RouteTrace([1, -1], [[[0]], [[0]]], [0]), r"\[token 1\].*found -1.*leave padding out"),
    "huge token id": (lambda: RouteTrace([2**31], [[[0]]], [0]), "token id out of range"),
    "nested tokens": (lambda: RouteTrace(np.array([[1]]), [[[0]]], [0]), "one-dimensional"),
    "layers out of order": (lambda: RouteTrace([1], [[[0], [0]]], [2, 1]), r"increasing.*found \(2, 1\)"),
    "a layer twice": (lambda: RouteTrace([1], [[[0], [0]]], [1, 1]), "increasing"),
    "no layers": (lambda: RouteTrace([1], np.zeros((1, 0, 1), int), []), "increasing"),
    "valid of another shape": (
        lambda: RouteTrace([1], [[[0]]], [0], [True, True]),
        r"\(1,\) or \(1, 1\), found \(2,\)",
    ),
    "valid as numbers": (lambda: RouteTrace([1], [[[0]]], [0], [1]), "must be booleans"),
    "versions not from the start": (lambda: RouteTrace([1, 2], [[[0]], [[0]]], [0], None, [(1, 3)]), "spans in order"),
    "versions out of order": (
        lambda: RouteTrace([1, 2], [[[0]], [[0]]], [0], None, [(0, 1), (0, 2)]),
        "spans in order",
    ),
    "versions beyond the end": (lambda: RouteTrace([1], [[[0]]], [0], None, [(0, 1), (1, 2)]), "the last before 1"),
    "negative version": (lambda: RouteTrace([1], [[[0]]], [0], None, -1), "versions >= 0"),
    "a step": (lambda: ONE[::2], r"contiguous range: expected step 1, found 2"),
    "an unknown way": (lambda: ONE.continued_by(ONE, ANYTHING), "'as_sampled' or 'latest', found 1.5"),
    "a missing layer": (lambda: ONE.select_layers([4, 5]), r"\[layer 5\].*with_uncaptured_layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_itself_is_refused(name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(TraceError, match=problem):
        make()


def test_a_trace_has_no_single_tokens() -> None:
    token: Any = 0
    with pytest.raises(TypeError, match="slice of tokens"):
        ONE[token]


def test_versions_of_one_history_compare_equal() -> None:
    experts = [[[0]], [[0]], [[0]]]
    spans = RouteTrace([1, 2, 3], experts, [0], None, [(0, 4), (1, 4), (2, 5)])
    assert spans.versions == (VersionSpan(0, 4), VersionSpan(2, 5))
    assert spans == RouteTrace([1, 2, 3], experts, [0], None, [(0, 4), (2, 5)])
    assert spans.token_versions.tolist() == [4, 4, 5]
    assert spans != RouteTrace([1, 2, 3], experts, [0], None, 4)


def test_nothing_follows_an_empty_turn() -> None:
    """A pass that adds no token adds no weight version."""
    assert ONE.extend(RouteTrace.uncovered([], [4], 2, 9, num_experts=8)) == ONE
    newer = RouteTrace(ONE.token_ids, ONE.routed_experts, [4], None, 9, num_experts=8)
    assert ONE.continued_by(newer) == ONE
    assert ONE.continued_by(newer, "latest") == newer


# ---- an expert twice in a row ----------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 40), st.integers(0, 99), st.integers(0, 2))
def test_the_first_duplicate_is_found(top_k: int, tokens: int, layers: int, seed: int, planted: int) -> None:
    random = np.random.default_rng(seed)
    experts = random.random((tokens, layers, 9)).argsort(axis=-1)[..., :top_k].astype(np.uint8)
    valid = random.random((tokens, layers)) < 0.5
    for _ in range(planted):
        token, slot = random.integers(tokens), random.integers(layers)
        experts[token, slot] = experts[token, slot, 0]
    found = [
        (token, slot)
        for token in range(tokens)
        for slot in range(layers)
        if valid[token, slot] and len(set(experts[token, slot].tolist())) < top_k
    ]
    assert first_duplicate(experts, valid) == (found[0] if found else None)


@pytest.mark.parametrize("place", [(0, 0), (203, 39), (204, 0), (299, 7)])
def test_a_duplicate_is_found_in_a_long_trace(place: tuple[int, int]) -> None:
    experts = np.broadcast_to(np.arange(3, dtype=np.uint8), (300, 40, 3)).copy()
    experts[place] = 5
    assert first_duplicate(experts, np.ones((300, 40), bool)) == place


def test_each_block_of_a_long_trace_has_its_own_coverage() -> None:
    experts = np.tile(np.uint8([[[0, 1]]]), (9000, 1, 1))
    experts[8500] = 1  # the first block of rows is covered, what has an expert twice is not
    valid = np.arange(9000) != 8500
    assert RouteTrace(range(9000), experts, [3], valid, num_experts=4).covered_fraction == 8999 / 9000
    assert first_duplicate(experts, valid[:, None]) is None
    valid = np.arange(9000) >= 8400  # and the other way round
    with pytest.raises(TraceError, match=r"twice in one row \[layer 3, token 8500\]"):
        RouteTrace(range(9000), experts, [3], valid, num_experts=4)


def test_parts_from_a_reader_are_checked_once() -> None:
    experts = np.array([[[1, 1]], [[2, 3]]], np.uint8)
    parts = (np.array([5, 6], np.int32), experts, (4,))
    bad = trace_from_parts(*parts, np.ones((2, 1), bool), (VersionSpan(0, 0),), 8)
    with pytest.raises(TraceError, match=r"twice in one row \[sample 3, layer 4, token 0\]"):
        bad.check_rows(sample=3)
    with pytest.raises(TraceError, match="twice in one row"):
        bad[:1].check_rows()
    bad[1:].check_rows()
    with pytest.raises(TraceError, match="twice in one row"):
        ONE.extend(bad).check_rows()
    unrecorded = trace_from_parts(*parts, np.array([[False], [True]]), (VersionSpan(0, 0),), 8)
    unrecorded.check_rows()


def test_a_trace_says_what_it_is() -> None:
    text = "RouteTrace(2 tokens, 1 layers [4], top 2 of 8, 100.0% covered, versions [0])"
    assert repr(ONE) == text
    assert (ONE == "something else") is False


def test_copies_stay_read_only() -> None:
    trace = RouteTrace([5, 7], [[[0, 3]], [[2, 1]]], [1], num_experts=4)
    layout = TokenLayout.padded([2])
    for copied in (copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        assert copied == trace
        assert not copied.routed_experts.flags.writeable
        assert not copied.token_ids.flags.writeable
    for made in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert np.array_equal(made.fed, layout.fed)
        assert not made.fed.flags.writeable
