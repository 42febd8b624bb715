"""The shift table: what it counts, what it leaves out, and what is judged from it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_replay as mr
from moe_replay.verification.agreement import expert_overlap
from moe_replay.verification.alignment_verdict import Cause, Verdict, judge, range_of_layers
from moe_replay.verification.shift import HERE, SHIFTS, ShiftTable, shift_table
from moe_replay.verification.wrong_rows import RowScores
from tests.verification.routes import Routers, healthy, with_routes


def tables(native, given, layout) -> ShiftTable:
    return shift_table(mr.RouteBatch.from_traces(native, layout), mr.RouteBatch.from_traces(given, layout), layout)


def packed_table(native, given) -> ShiftTable:
    return tables(native, given, mr.TokenLayout.packed([len(trace) for trace in native]))


def by_hand(native, given, layer_shift, token_shift, slot) -> list[float]:
    """The agreement of every pair that can be compared, one by one."""
    found = []
    for ours, theirs in zip(native, given, strict=True):
        for token in range(len(ours)):
            other, there = token + token_shift, slot + layer_shift
            inside = 0 <= other < len(ours) and 0 <= there < len(ours.layers)
            if inside and theirs.valid[token, slot] and theirs.valid[other, there]:
                common = set(ours.routed_experts[token, slot].tolist()) & set(
                    theirs.routed_experts[other, there].tolist()
                )
                found.append(len(common) / ours.top_k)
    return found


def test_shared_experts_are_a_set():
    one, other = torch.tensor([[1, 2], [1, 2], [0, 3]]), torch.tensor([[2, 1], [2, 5], [0, 0]])
    assert expert_overlap(one, other).tolist() == [1.0, 0.5, 0.5]


@settings(max_examples=15)
@given(
    st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=3)
)
def test_the_table_is_what_counting_one_by_one_gives(seed, layers, top_k, lengths):
    native, given_ = healthy(seed, lengths, layers=layers, num_experts=5, top_k=top_k)
    holes = np.random.default_rng(seed).random((2, 9, layers)) < 0.8
    given_ = [with_routes(t, t.routed_experts, t.valid & holes[i % 2, : len(t)]) for i, t in enumerate(given_)]
    table = packed_table(native, given_)
    for slot, (row, layer_shift), (column, token_shift) in itertools.product(
        range(layers), enumerate(SHIFTS), enumerate(SHIFTS)
    ):
        pairs = by_hand(native, given_, layer_shift, token_shift, slot)
        assert table.counts[slot, row, column] == len(pairs)
        if pairs:
            assert table.agreement[slot, row, column] == pytest.approx(np.mean(pairs))


def test_chance_is_the_agreement_of_all_pairs_of_different_tokens():
    native, given_ = healthy(3, (7, 6), layers=3, num_experts=6, top_k=2)
    table = packed_table(native, given_)
    ours, theirs = (np.concatenate([t.routed_experts[:-1] for t in traces]) for traces in (native, given_))
    for slot, other in ((1, 1), (0, 2), (2, 1)):
        pairs = [
            len(set(ours[i, slot]) & set(theirs[j, other])) / 2 for i, j in itertools.permutations(range(len(ours)), 2)
        ]
        assert table.chance[slot, HERE + other - slot] == pytest.approx(np.mean(pairs))


LENGTHS = (13, 8, 10)
LAYOUTS = {
    "packed": mr.TokenLayout.packed(LENGTHS, pad_each_to_multiple_of=4),
    "left": mr.TokenLayout.padded(LENGTHS, 17, "left"),
    "right": mr.TokenLayout.padded(LENGTHS, 16),
    "sequence major": mr.TokenLayout.padded(LENGTHS, 16).sequence_major(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_table_does_not_depend_on_where_rows_lie(name):
    native, given_ = healthy(0, LENGTHS)
    expected, found = packed_table(native, given_), tables(native, given_, LAYOUTS[name])
    torch.testing.assert_close(found.vector(), expected.vector())


@pytest.mark.parametrize("name", LAYOUTS)
def test_padding_never_counts_even_where_it_was_recorded(name):
    native, _ = healthy(0, LENGTHS)
    batch = mr.RouteBatch.from_traces(native, LAYOUTS[name])
    recorded = replace(batch, valid=torch.ones_like(batch.valid))  # a recording knows of no padding
    found = shift_table(recorded, recorded, LAYOUTS[name])
    torch.testing.assert_close(found.vector(), packed_table(native, native).vector())


@pytest.mark.parametrize("order", ["batch", "sequence"])
def test_shares_of_sequence_parallel_ranks_add_up_but_for_pairs_across_their_border(order):
    native, given_ = healthy(0, LENGTHS)
    whole = mr.TokenLayout.padded(LENGTHS, 16)
    whole = whole.sequence_major() if order == "sequence" else whole
    total = sum_of(tables(native, given_, whole.sequence_parallel(rank, 2)) for rank in range(2))
    expected = tables(native, given_, whole)
    torch.testing.assert_close(total.loads, expected.loads)
    torch.testing.assert_close(total.pairs[:, :, HERE], expected.pairs[:, :, HERE])
    missing = expected.counts - total.counts
    assert missing[0, HERE].tolist() == [3, 2, 0, 2, 3]  # of the two sequences that the border cuts


def sum_of(parts) -> ShiftTable:
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


def test_micro_batches_add_up_to_the_whole():
    native, given_ = healthy(1, (30, 20, 25))
    parts = [packed_table(native[:1], given_[:1]), packed_table(native[1:], given_[1:])]
    whole = packed_table(native, given_)
    torch.testing.assert_close(sum_of(parts).vector(), whole.vector())
    np.testing.assert_allclose(sum_of(parts).chance, whole.chance)
    torch.testing.assert_close(whole.with_vector(whole.vector() * 2).pairs, whole.pairs * 2)


def test_layers_of_pipeline_stages_add_up():
    native, given_ = healthy(1)
    layout = mr.TokenLayout.packed([len(t) for t in native])
    ours, theirs = mr.RouteBatch.from_traces(native, layout), mr.RouteBatch.from_traces(given_, layout)
    halves = (range(1, 5), range(5, 9))
    total = sum_of(shift_table(ours.select_layers(half), theirs.select_layers(half), layout) for half in halves)
    whole = shift_table(ours, theirs, layout)
    torch.testing.assert_close(total.pairs[:, HERE], whole.pairs[:, HERE])
    assert judge(total).aligned


def test_rows_without_a_route_never_count():
    native, given_ = healthy(2, (20, 15))
    layout = mr.TokenLayout.packed([20, 15])
    ours, theirs = mr.RouteBatch.from_traces(native, layout), mr.RouteBatch.from_traces(given_, layout)
    changed = replace(theirs, routed_experts=torch.where(theirs.valid[..., None], theirs.routed_experts, 7))
    assert not torch.equal(changed.routed_experts, theirs.routed_experts)
    torch.testing.assert_close(
        shift_table(ours, changed, layout).vector(), shift_table(ours, theirs, layout).vector(), rtol=0, atol=0
    )


def test_a_sample_of_rows_is_the_table_of_these():
    native, given_ = healthy(2, (20, 15))
    layout = mr.TokenLayout.packed([20, 15])
    ours, theirs = mr.RouteBatch.from_traces(native, layout), mr.RouteBatch.from_traces(given_, layout)
    part = shift_table(ours, theirs, layout, rows=np.array([3, 4, 19, 34]))
    assert part.counts[:, HERE, HERE].tolist() == [2] * 8  # rows 19 and 34 have no route
    assert part.counts[1].tolist() == [[0] * 5, [2] * 5, [2] * 5, [2] * 5, [2] * 5]  # layer 2 has one layer before it


def test_other_layers_and_rows_are_refused():
    native, given_ = healthy(0, (10,))
    layout = mr.TokenLayout.packed([10])
    ours, theirs = mr.RouteBatch.from_traces(native, layout), mr.RouteBatch.from_traces(given_, layout)
    with pytest.raises(mr.AlignmentError, match="same layers and rows"):
        shift_table(ours, theirs.select_layers(range(2, 6)), layout)
    with pytest.raises(mr.AlignmentError, match="same layers and rows"):
        shift_table(ours, theirs, mr.TokenLayout.packed([11]))
    with pytest.raises(mr.AlignmentError, match="different models"):
        packed_table(native, given_) + packed_table(*healthy(0, (10,), layers=2))


# ---- the verdict -----------------------------------------------------------------------------------------------------


def test_healthy_routes_peak_where_nothing_is_moved():
    table = packed_table(*healthy(0))
    assert judge(table).aligned
    pooled = table.pooled()
    assert pooled[HERE, HERE] > 0.7
    assert np.delete(pooled.flatten(), HERE * len(SHIFTS) + HERE).max() < 0.4
    assert "agreement above chance" in str(table)


@pytest.mark.parametrize(("layers", "tokens"), [(1, 0), (-1, 0), (2, 0), (0, 1), (0, -2), (1, 1), (-2, 1)])
def test_a_shift_is_found_and_named(layers, tokens):
    native, given_ = healthy(0)
    moved = [
        with_routes(t, np.roll(t.routed_experts, (tokens, layers), (0, 1)), np.roll(t.valid, (tokens, layers), (0, 1)))
        for t in given_
    ]
    verdict = judge(packed_table(native, moved))
    assert (verdict.status, verdict.layer_shift, verdict.token_shift) == ("misaligned", layers, tokens)
    assert verdict.cause == (Cause.LAYER_SHIFT if layers else Cause.TOKEN_SHIFT)
    assert ("late" if max(layers, tokens) > 0 else "early") in verdict.detail
    with pytest.raises(mr.AlignmentError, match=r"routes are (one|two)"):
        verdict.raise_if_misaligned()


def test_layers_that_are_moved_apart_have_no_common_shift():
    native, given_ = healthy(0, layers=3)
    backwards = [with_routes(t, t.routed_experts[:, ::-1]) for t in given_]
    verdict = judge(packed_table(native, backwards))
    assert (verdict.layers, verdict.layer_shift) == ((1, 3), None)


def test_one_lost_layer_is_named():
    native, given_ = healthy(0)
    spoilt = []
    for trace in given_:
        experts = trace.routed_experts.copy()
        experts[:-1, 4] = experts[-2::-1, 4]  # the sequence backwards
        spoilt.append(with_routes(trace, experts))
    verdict = judge(packed_table(native, spoilt))
    assert (verdict.status, verdict.layers, verdict.layer_shift) == ("misaligned", (5,), None)
    assert verdict.detail == "routes agree with native routing no better than chance in layer 5"


def test_routers_that_send_every_token_to_the_same_experts_tell_nothing():
    native, given_ = healthy(0)
    alike = [with_routes(t, np.broadcast_to(np.arange(4), t.routed_experts.shape)) for t in native]
    table = packed_table(alike, alike)
    assert table.information.tolist() == [0.0] * 8
    assert judge(table).cause == Cause.LITTLE_EVIDENCE
    # Such a layer among others does not disturb.
    for traces in (native, given_):
        for number, trace in enumerate(traces):
            experts = trace.routed_experts.copy()
            experts[:, 3] = np.where(trace.valid[:, 3, None], np.arange(4), 0)
            traces[number] = with_routes(trace, experts)
    assert judge(packed_table(native, given_)).aligned


@pytest.mark.parametrize("planted", [False, True])
def test_a_handful_of_tokens_is_no_evidence(planted):
    native, given_ = healthy(0, (5,), layers=2, num_experts=8, top_k=1)
    if planted:
        given_ = [with_routes(t, (t.routed_experts + 1) % 8) for t in given_]
    assert judge(packed_table(native, given_)).status == "unclear"


def test_a_token_repeated_many_times_is_one_token():
    made = Routers(0, layers=1, num_experts=8, top_k=1)
    words = made.tokens([2], alike=0)[0]
    native = made.route([np.repeat(words, 100, axis=0)])
    flipped = [with_routes(t, (t.routed_experts + 3) % 8) for t in native]  # two near-ties that fell the other way
    table = packed_table(native, flipped)
    assert table.counts[0, HERE, HERE] == 200
    assert table.effective_rows[0] < 10
    assert judge(table).status == "unclear"


def test_without_routes_there_is_no_verdict():
    native, given_ = healthy(0, (10, 12))
    bare = [with_routes(t, t.routed_experts, np.zeros(len(t), bool)) for t in given_]
    assert judge(packed_table(native, bare)).status == "unclear"


def test_lost_groups_of_rows():
    gained = torch.tensor([[36.0] * 20, [0.5] * 20, [0.0] * 20], dtype=torch.float64)
    possible = torch.tensor([[40.0] * 20, [40.0] * 20, [40.0] * 2 + [0.0] * 18], dtype=torch.float64)
    judged, lost = RowScores(gained, possible, top_k=4).at_chance()
    assert judged.tolist() == [True, True, False]
    assert lost.tolist() == [False, True, False]


def test_what_is_logged():
    statuses = ("aligned", "misaligned", "unclear")
    assert [Verdict(status=status).metric for status in statuses] == [1.0, 0.0, pytest.approx(np.nan, nan_ok=True)]


def test_layers_in_words():
    seen = [1, 2, 3, 4]
    words = [range_of_layers(wrong, seen) for wrong in ([1, 2, 3, 4], [3, 4], [1, 2], [2], [1, 3])]
    assert words == ["in all layers", "from layer 3 on", "up to layer 2", "in layer 2", "in layers 1, 3"]
