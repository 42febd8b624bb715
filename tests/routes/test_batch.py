"""Routes gathered through a layout: every row holds the routes of its token, and of no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.errors import AlignmentError, TraceError
from moe_replay.routes import batch as batch_module
from moe_replay.routes.batch import Coverage, RouteBatch, layer_major_on
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.routes.trace import RouteTrace
from tests.routes.parts import trace_from_parts

LAYERS = (1, 2, 5, 6, 9)


def some_traces(
    lengths: Sequence[int],
    *,
    layers: Sequence[int] = LAYERS,
    top_k: int = 2,
    num_experts: int | None = 8,
    below: int = 8,
    covered: Literal["all", "tokens", "pairs"] = "all",
    seed: int = 0,
) -> list[RouteTrace]:
    """Random routes over experts 0 to `below` - 1; `covered` says which of them are recorded."""
    random = np.random.default_rng(seed)
    traces = []
    for length in lengths:
        experts = random.random((length, len(layers), below)).argsort(axis=-1)[..., :top_k]
        valid = {
            "all": None,
            "tokens": random.random(length) < 0.7,
            "pairs": random.random((length, len(layers))) < 0.7,
        }[covered]
        ids = random.integers(0, 1000, length)
        traces.append(RouteTrace(ids, experts, layers, valid, 3, num_experts=num_experts))
    return traces


def token_ids(traces: Sequence[RouteTrace]) -> list[np.ndarray]:
    return [trace.token_ids for trace in traces]


@dataclass(frozen=True)
class Case:
    """Traces, and the layouts of all ranks that share them."""

    traces: list[RouteTrace]
    layouts: list[TokenLayout]
    stages: list[tuple[int, ...]]  # layers of each pipeline stage
    piece: int  # tokens moved at once


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    experts = draw(st.sampled_from([8, 256, 300]))
    traces = some_traces(
        lengths,
        top_k=draw(st.integers(1, 5)),
        num_experts=experts,
        below=experts,
        covered=draw(st.sampled_from(["all", "tokens", "pairs"])),
        seed=draw(st.integers(0, 99)),
    )
    context, sequence = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    style: Literal["zigzag", "contiguous"] = draw(st.sampled_from(("zigzag", "contiguous")))
    even = 2 * context * sequence
    wholes = {
        "left": TokenLayout.padded(lengths, side="left"),
        "right": TokenLayout.padded(lengths, side="right"),
        "packed": TokenLayout.packed(lengths, pad_each_to_multiple_of=even),
    }
    whole = wholes[draw(st.sampled_from(sorted(wholes)))].pad_to(multiple_of=even)
    major = draw(st.booleans())
    layouts = []
    for context_rank in range(context):
        fed = whole.context_parallel(context_rank, context, style)
        fed = fed.sequence_major() if major else fed
        layouts += [fed.sequence_parallel(rank, sequence) for rank in range(sequence)]
    stage_of = draw(st.lists(st.integers(0, 2), min_size=len(LAYERS), max_size=len(LAYERS)))
    stages = [tuple(layer for layer, s in zip(LAYERS, stage_of, strict=True) if s == stage) for stage in range(3)]
    return Case(traces, layouts, [stage for stage in stages if stage], draw(st.sampled_from([1, 2, 3, 256])))


def gathered(case: Case, layout: TokenLayout, layers: Sequence[int] | None = None) -> RouteBatch:
    with mock.patch.object(batch_module, "TOKENS_PER_RUN", case.piece):
        return RouteBatch.from_traces(case.traces, layout, layers)


def ids_of(batch: RouteBatch) -> np.ndarray:
    return batch.routed_experts.numpy().astype(np.int64)


# ---- from traces -----------------------------------------------------------------------------------------------------


def test_a_gpu_lays_out_padding_alone() -> None:
    layout = TokenLayout(np.full((1, 4), -1), (0,), (4,))
    nothing = np.zeros((0, len(LAYERS), 2), np.uint8)
    assert layer_major_on(torch.device("cpu"), [nothing], layout, slice(None)).tolist() == [[[0, 0]] * 4] * len(LAYERS)


@given(cases())
def test_every_row_holds_the_routes_of_its_token(case: Case) -> None:
    for layout in case.layouts:
        for layers in case.stages:
            batch = gathered(case, layout, layers)
            expected = np.zeros((len(layers), layout.num_rows, case.traces[0].top_k), np.int64)
            valid = np.zeros((len(layers), layout.num_rows), bool)
            for row, token in enumerate(layout.rows.tolist()):
                if token == -1:
                    continue
                sequence, position = layout.locate(token)
                trace = case.traces[sequence]
                for number, layer in enumerate(layers):
                    slot = trace.layers.index(layer)
                    expected[number, row] = trace.routed_experts[position, slot]
                    valid[number, row] = trace.valid[position, slot]
            assert np.array_equal(ids_of(batch), expected)
            assert np.array_equal(batch.valid.numpy(), valid)
            assert batch.layers == layers
            assert batch.source_layers == LAYERS
            assert batch.all_valid == tuple(bool(rows.all()) for rows in valid)
            assert batch.max_expert == max(trace.routed_experts.max(initial=0) for trace in case.traces)
            parts = [trace.routed_experts[:, [trace.layers.index(layer) for layer in layers]] for trace in case.traces]
            on_device = layer_major_on(torch.device("cpu"), parts, layout, slice(None))  # as on a GPU
            assert np.array_equal(on_device.numpy().astype(np.int64), expected)
            token_rows = sum(token != -1 for token in layout.rows.tolist())
            replayed = tuple(rows.tolist().count(True) for rows in valid)
            assert batch.coverage == Coverage(layout.num_rows, token_rows, replayed)


@given(cases())
def test_shards_of_all_ranks_merge_to_the_traces(case: Case) -> None:
    """Context, sequence and pipeline parallel: what every rank holds, written back and joined, is what it was."""
    ids = token_ids(case.traces)
    shards: list[list[RouteTrace]] = [[] for _ in case.traces]
    for layout in case.layouts:
        for layers in case.stages:
            batch = gathered(case, layout, layers)
            with mock.patch.object(batch_module, "TOKENS_PER_RUN", case.piece):
                written = batch.to_traces(ids, layout, weight_version=3)
            again = RouteBatch.from_traces(written, layout)
            assert torch.equal(again.routed_experts, batch.routed_experts)
            assert torch.equal(again.valid, batch.valid)
            for parts, shard in zip(shards, written, strict=True):
                parts.append(shard)
    assert [RouteTrace.merge(parts) for parts in shards] == case.traces


@pytest.mark.parametrize("order", ["batch", "sequence"])
@pytest.mark.parametrize("top_k", [2, 8, 10])
@pytest.mark.parametrize("covered", ["all", "pairs"])
def test_sequences_longer_than_a_piece(order: str, top_k: int, covered: Literal["all", "pairs"]) -> None:
    traces = some_traces([700, 1, 513], top_k=top_k, num_experts=300, below=300, covered=covered)
    layout = TokenLayout.padded([700, 1, 513], side="left")
    layout = layout.sequence_major() if order == "sequence" else layout
    batch = RouteBatch.from_traces(traces, layout)
    padded = np.concatenate([t.routed_experts for t in traces] + [np.zeros((1, len(LAYERS), top_k), int)])
    assert np.array_equal(ids_of(batch), padded[layout.rows].transpose(1, 0, 2))
    assert batch.to_traces(token_ids(traces), layout, weight_version=3) == traces


def test_any_order_of_rows_is_served() -> None:
    """Also one that no step of a layout makes."""
    traces = some_traces([5, 4])
    order = [3, -1, 8, 0, 1, 2, 4, -1, 7, 6, 5]
    layout = TokenLayout(np.array([order]), lengths=(5, 4), segments=(11,))
    padded = np.concatenate([t.routed_experts for t in traces] + [np.zeros((1, len(LAYERS), 2), int)])
    assert np.array_equal(ids_of(RouteBatch.from_traces(traces, layout)), padded[order].transpose(1, 0, 2))


@given(cases())
def test_no_layout_is_moved_token_by_token(case: Case) -> None:
    for layout in case.layouts:  # a zigzag holds two runs of a sequence, and no run here is longer than a piece
        assert len(batch_module.runs_of(layout)) <= 2 * len(case.traces)


def test_ids_keep_their_value_in_the_narrow_dtype() -> None:
    layout = TokenLayout.packed([1])
    narrow = RouteBatch.from_traces([RouteTrace([5], [[[255, 0]]], [1], num_experts=256)], layout)
    wide = RouteBatch.from_traces([RouteTrace([5], [[[300, 32767]]], [1])], layout)
    assert (narrow.routed_experts.dtype, narrow.routed_experts.tolist()) == (torch.uint8, [[[255, 0]]])
    assert (wide.routed_experts.dtype, wide.routed_experts.tolist()) == (torch.int16, [[[300, 32767]]])
    assert (narrow.max_expert, wide.max_expert) == (255, 32767)


def test_a_wide_trace_widens_the_whole_batch() -> None:
    traces = [RouteTrace([5], [[[255, 0]]], [1]), RouteTrace([6], [[[300, 1]]], [1])]
    batch = RouteBatch.from_traces(traces, TokenLayout.packed([1, 1]))
    assert batch.routed_experts.tolist() == [[[255, 0], [300, 1]]]


def test_number_of_experts_is_known_if_any_trace_knows_it() -> None:
    traces = [*some_traces([2], num_experts=None), *some_traces([2], num_experts=8)]
    assert RouteBatch.from_traces(traces, TokenLayout.packed([2, 2])).num_experts == 8
    assert RouteBatch.from_traces(traces[:1], TokenLayout.packed([2])).num_experts is None


def test_ids_to_feed_belong_to_the_batch() -> None:
    traces = some_traces([2, 3])
    layout = TokenLayout.padded([2, 3], side="left")
    fed = RouteBatch.from_traces(traces, layout).fed_token_ids
    assert fed is not None
    assert (fed.dtype, fed.tolist()) == (torch.int32, layout.fed_token_ids(token_ids(traces)).tolist())


def test_traces_that_do_not_belong_together_are_refused() -> None:
    traces = some_traces([2, 3])
    layout = TokenLayout.packed([2, 3])
    with pytest.raises(AlignmentError, match=r"another length .*\[sample 1\]: expected 3 tokens, found 2 tokens"):
        RouteBatch.from_traces([traces[0], traces[1][:2]], layout)
    with pytest.raises(AlignmentError, match="another number of sequences: expected 2, found 3"):
        RouteBatch.from_traces([*traces, traces[0]], layout)
    with pytest.raises(
        AlignmentError, match=r"different routers \[sample 1\]: .*5, 6, 9\], top 2, found layers \[1, 2\]"
    ):
        RouteBatch.from_traces([traces[0], traces[1].select_layers([1, 2])], layout)
    with pytest.raises(AlignmentError, match=r"different routers \[sample 1\].*found.*top 3"):
        RouteBatch.from_traces([traces[0], *some_traces([3], top_k=3)], layout)
    with pytest.raises(AlignmentError, match=r"numbers of experts \[sample 1\]: expected 8, found 9"):
        RouteBatch.from_traces([traces[0], *some_traces([3], num_experts=9)], layout)


def test_a_layer_without_routes_is_refused_with_the_way_to_declare_it() -> None:
    traces = some_traces([2])
    with pytest.raises(TraceError, match=r"\[layer 3\].*with_uncaptured_layers"):
        RouteBatch.from_traces(traces, TokenLayout.packed([2]), [2, 3])
    declared = [trace.with_uncaptured_layers([3]) for trace in traces]
    batch = RouteBatch.from_traces(declared, TokenLayout.packed([2]), [2, 3])
    assert batch.all_valid == (True, False)
    assert batch.select_layers([3]).all_valid == (False,)
    counts = Coverage(rows=2, token_rows=2, replayed_in_layer=(2, 0))
    assert batch.coverage == counts
    assert (counts.replayed, counts.native) == (2, 2)


def test_an_expert_twice_in_a_row_names_the_sample() -> None:
    good = some_traces([2])[0]
    experts = np.array(good.routed_experts)
    experts[1, 3] = 4
    unchecked = trace_from_parts(good.token_ids, experts, good.layers, np.ones((2, 1), bool), good.versions, 8)
    with pytest.raises(TraceError, match=r"twice in one row \[sample 1, layer 6, token 1\].*found \[4, 4\]"):
        RouteBatch.from_traces([good, unchecked], TokenLayout.packed([2, 2]))


# ---- parts and places ------------------------------------------------------------------------------------------------


# ---- rows on which nothing depends -----------------------------------------------------------------------------------


def without(traces: Sequence[RouteTrace], *gaps: tuple[int, int, slice]) -> list[RouteTrace]:
    """The traces without the routes of some (sample, token, layers)."""
    masks = [trace.valid.copy() for trace in traces]
    for sample, token, layers in gaps:
        masks[sample][token, layers] = False
    return [
        RouteTrace(trace.token_ids, trace.routed_experts, trace.layers, valid, num_experts=8)
        for trace, valid in zip(traces, masks, strict=True)
    ]


EVERY = slice(None)


def test_rows_on_which_nothing_depends_hold_the_experts_of_others_and_stay_invalid() -> None:
    traces = without(some_traces([4, 2]), (0, 3, EVERY), (1, 1, EVERY))
    layout = TokenLayout.padded([4, 2])
    batch, plain = RouteBatch.from_traces(traces, layout, stand_ins=True), RouteBatch.from_traces(traces, layout)
    assert batch.stand_ins
    assert not plain.stand_ins
    assert torch.equal(batch.valid, plain.valid)
    assert (batch.all_valid, batch.coverage) == (plain.all_valid, plain.coverage)
    with_route = plain.valid[0].nonzero()[:, 0].tolist()  # 0 to 2, and 4
    assert torch.equal(batch.routed_experts[:, with_route], plain.routed_experts[:, with_route])
    assert torch.equal(batch.routed_experts[:, [3, 5, 6, 7]], plain.routed_experts[:, with_route])
    assert batch.to_traces(token_ids(traces), layout) == plain.to_traces(token_ids(traces), layout)
    complete = batch.with_stand_ins()
    assert complete.valid.all()
    assert all(complete.all_valid)
    assert complete.routed_experts is batch.routed_experts
    assert plain.with_stand_ins() is plain


def test_a_route_that_a_row_has_in_some_layers_stays_its_own() -> None:
    traces = without(some_traces([4]), (0, 3, slice(1, 3)))
    batch = RouteBatch.from_traces(traces, TokenLayout.packed([4]), stand_ins=True)
    assert batch.stand_ins
    expected = np.swapaxes(traces[0].routed_experts, 0, 1).copy()
    expected[1:3, 3] = expected[1:3, 0]
    assert np.array_equal(batch.routed_experts.numpy(), expected)


@pytest.mark.parametrize(
    "gaps",
    [
        [(0, 3, EVERY), (1, 0, EVERY)],  # another token than the last
        [(0, 2, slice(1, 2))],  # in one layer
        [],  # nothing lacks a route
        [(sample, token, EVERY) for sample, tokens in enumerate([4, 2]) for token in range(tokens)],
    ],
)
def test_no_row_has_a_stand_in_where_that_would_not_complete_the_batch(gaps: list[tuple[int, int, slice]]) -> None:
    traces = without(some_traces([4, 2]), *gaps)
    layout = TokenLayout.packed([4, 2])
    batch, plain = RouteBatch.from_traces(traces, layout, stand_ins=True), RouteBatch.from_traces(traces, layout)
    assert not batch.stand_ins
    assert torch.equal(batch.routed_experts, plain.routed_experts)


@pytest.mark.parametrize("covered", ["tokens", "pairs"])
@pytest.mark.parametrize("layers", [(2, 5), (1, 6), (9,)])
def test_selected_layers_are_those_of_the_whole(covered: Literal["tokens", "pairs"], layers: tuple[int, ...]) -> None:
    traces = some_traces([40, 30], covered=covered)
    layout = TokenLayout.padded([40, 30])
    whole = RouteBatch.from_traces(traces, layout)
    part, direct = whole.select_layers(layers), RouteBatch.from_traces(traces, layout, layers)
    assert (part.layers, part.all_valid, part.coverage) == (layers, direct.all_valid, direct.coverage)
    assert torch.equal(part.routed_experts, direct.routed_experts)
    assert torch.equal(part.valid, direct.valid)
    for layer in layers:
        experts, valid, all_valid = part.layer(layer)
        slot = LAYERS.index(layer)
        assert torch.equal(experts, whole.routed_experts[slot])
        assert torch.equal(valid, whole.valid[slot])
        assert all_valid == whole.all_valid[slot]


def test_neighbouring_layers_are_a_view() -> None:
    whole = RouteBatch.from_traces(some_traces([4]), TokenLayout.packed([4]))
    assert whole.select_layers([2, 5]).routed_experts.data_ptr() == whole.routed_experts[1].data_ptr()


def test_a_layer_that_is_not_there_is_named() -> None:
    batch = RouteBatch.from_traces(some_traces([2]), TokenLayout.packed([2]))
    for use in (batch.layer, lambda layer: batch.select_layers([1, layer])):
        with pytest.raises(AlignmentError, match=r"\[layer 3\].*found layers \[1, 2, 5, 6, 9\]"):
            use(3)


@pytest.mark.parametrize("covered", ["tokens", "pairs"])
def test_a_batch_moves_as_a_whole(covered: Literal["tokens", "pairs"]) -> None:
    batch = RouteBatch.from_traces(some_traces([6], covered=covered), TokenLayout.packed([6]))
    moved = batch.to("meta", non_blocking=True)
    assert moved.fed_token_ids is not None
    assert {t.device.type for t in (moved.routed_experts, moved.valid, moved.fed_token_ids)} == {"meta"}
    assert (moved.routed_experts.shape, moved.valid.shape) == (batch.routed_experts.shape, batch.valid.shape)
    assert (moved.layers, moved.all_valid, moved.coverage) == (batch.layers, batch.all_valid, batch.coverage)
    # One row of flags that all layers share travels once.
    assert (moved.valid.stride(0) == 0) == (covered == "tokens")
    assert torch.equal(batch.to("cpu").valid, batch.valid)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs an accelerator")
@pytest.mark.parametrize("covered", ["tokens", "pairs"])
def test_a_batch_travels_through_pinned_memory(covered: Literal["tokens", "pairs"]) -> None:
    batch = RouteBatch.from_traces(some_traces([6], covered=covered), TokenLayout.packed([6]))
    pinned = batch.pin_memory()
    assert pinned.routed_experts.is_pinned()
    there = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.routed_experts.cpu(), batch.routed_experts)
    assert torch.equal(there.valid.cpu(), batch.valid)


# ---- recorded --------------------------------------------------------------------------------------------------------

TOPOLOGY = MoeTopology(num_layers=10, moe_layers=tuple(MoeLayer(layer, num_experts=8, top_k=2) for layer in LAYERS))


def test_recording_never_waits_for_the_device() -> None:
    """The meta device has no values: whatever asked for one would raise."""
    chosen = {layer: torch.empty((6, 2), dtype=torch.uint8, device="meta") for layer in (5, 2)}
    batch = RouteBatch.recorded(chosen, TOPOLOGY, torch.empty((2, 3), dtype=torch.int64, device="meta"))
    batch.check((2, 5), num_experts=8, top_k=2)
    assert (batch.layers, batch.source_layers, batch.all_valid) == ((2, 5), LAYERS, (True, True))
    assert batch.routed_experts.shape == (2, 6, 2)
    assert batch.select_layers([5]).layer(5)[0].shape == (6, 2)


def test_what_a_rank_recorded_becomes_traces() -> None:
    layout = TokenLayout.padded([1, 3], side="left").sequence_major()
    assert layout.rows.tolist() == [-1, 1, -1, 2, 0, 3]
    chosen = {
        5: torch.tensor([[7, 6], [1, 2], [7, 6], [2, 3], [0, 1], [3, 4]], dtype=torch.uint8),
        2: torch.tensor([[7, 6], [5, 2], [7, 6], [5, 3], [5, 1], [5, 4]], dtype=torch.uint8),
    }
    batch = RouteBatch.recorded(chosen, TOPOLOGY, torch.tensor([[0, 0, 10], [11, 12, 13]]))
    traces = batch.to_traces([[10], [11, 12, 13]], layout, weight_version=4)
    assert traces == [
        RouteTrace([10], [[[5, 1], [0, 1]]], [2, 5], weight_version=4, num_experts=8),
        RouteTrace([11, 12, 13], [[[5, k], [k - 1, k]] for k in (2, 3, 4)], [2, 5], weight_version=4, num_experts=8),
    ]


def test_tokens_of_other_ranks_are_uncovered() -> None:
    traces = some_traces([8])
    layout = TokenLayout.packed([8]).context_parallel(1, 2)
    written = RouteBatch.from_traces(traces, layout).to_traces(token_ids(traces), layout)
    assert written[0].valid[:, 0].tolist() == [False, False, True, True, True, True, False, False]


def test_another_layout_cannot_be_written_back() -> None:
    traces = some_traces([8])
    batch = RouteBatch.from_traces(traces, TokenLayout.packed([8]))
    with pytest.raises(AlignmentError, match=r"another number of rows.*expected 4 rows, found 8 rows"):
        batch.to_traces(token_ids(traces), TokenLayout.packed([8]).context_parallel(0, 2))
    with pytest.raises(AlignmentError, match=r"another length.*\[sample 0\]: expected 8 tokens, found 2"):
        batch.to_traces([[1, 2]], TokenLayout.packed([8]))


# ---- checks before a forward -----------------------------------------------------------------------------------------


def test_routes_of_another_model_are_refused() -> None:
    batch = RouteBatch.from_traces(some_traces([4], num_experts=None, below=8), TokenLayout.packed([4]))
    batch.check(LAYERS, num_experts=8, top_k=2)
    batch.check((5,), num_experts=8, top_k=2)
    with pytest.raises(AlignmentError, match=r"\[layer 0\]: expected layers with 0 among them, found layers \[1, 2"):
        batch.check((0, 1), num_experts=8, top_k=2)
    with pytest.raises(AlignmentError, match=r"\[layer 1\]: expected top 4, found top 2"):
        batch.check(LAYERS, num_experts=8, top_k=4)
    known = RouteBatch.from_traces(some_traces([4]), TokenLayout.packed([4]))
    with pytest.raises(AlignmentError, match=r"\[layer 1\]: expected 16 experts, found 8 experts"):
        known.check(LAYERS, num_experts=16, top_k=2)


def test_an_id_beyond_the_experts_names_its_layer() -> None:
    experts = np.array([[[0, 1], [2, 6], [0, 1]]])
    batch = RouteBatch.from_traces([RouteTrace([1], experts, (1, 2, 5))], TokenLayout.packed([1]))
    batch.check((1, 2, 5), num_experts=7, top_k=2)
    with pytest.raises(AlignmentError, match=r"out of range \[layer 2\]: expected 0 to 5, found 6"):
        batch.check((1, 2, 5), num_experts=6, top_k=2)


def test_fed_ids_are_held_against_those_of_the_routes() -> None:
    traces = some_traces([2, 3])
    layout = TokenLayout.padded([2, 3], side="left")
    batch = RouteBatch.from_traces(traces, layout)
    fed = torch.from_numpy(layout.fed_token_ids(token_ids(traces), pad=0)).long()
    batch.check_fed(fed)
    fed[0, 2] += 1
    problem = rf"\[sample 0, token 1\].*in row 0, column 2, found token id {int(fed[0, 2])} \(1 of 5 tokens differ\)"
    with pytest.raises(AlignmentError, match=problem):
        batch.check_fed(fed)
    with pytest.raises(AlignmentError, match=r"another shape.*expected \(B, W\) = \(2, 3\), found \(3, 2\)"):
        batch.check_fed(fed.T)


def test_tokens_in_padding_are_told_by_their_ids_or_by_a_mask() -> None:
    """Without a mask, padding is what holds one and the same id: a lone token in the only padding passes."""
    traces = some_traces([2, 3])
    batch = RouteBatch.from_traces(traces, TokenLayout.padded([2, 3], width=4))
    fed = torch.from_numpy(batch.layout.fed_token_ids(token_ids(traces), pad=0)).long()
    mask = torch.tensor(batch.layout.fed >= 0).long()
    fed[0, 3] = 7
    for said in (None, mask.logical_or(fed == 7)):
        with pytest.raises(AlignmentError, match="1 tokens, the first of id 7 in row 0, column 3"):
            batch.check_fed(fed, said)
    assert batch.check_fed(fed, allow_unknown=True) == 1
    assert batch.check_fed(fed, mask) == 0
    lone = RouteBatch.from_traces(traces, TokenLayout.padded([2, 3]))
    assert lone.check_fed(fed[:, :3]) == 0
    fed[0, 2] = 7
    assert lone.check_fed(fed[:, :3]) == 0  # not seen
    with pytest.raises(AlignmentError, match="1 tokens, the first of id 7"):
        lone.check_fed(fed[:, :3], torch.ones(2, 3))


def test_a_recording_is_held_against_its_own_ids_alone() -> None:
    chosen = {2: torch.zeros((4, 2), dtype=torch.uint8)}
    fed = torch.tensor([[0, 5], [6, 7]])
    batch = RouteBatch.recorded(chosen, TOPOLOGY, fed)
    batch.check_fed(fed)
    with pytest.raises(AlignmentError, match="expected token id 0 in row 0, column 0, found token id 5"):
        batch.check_fed(fed.flip(1))
    with pytest.raises(AlignmentError, match="does not know its token ids"):
        RouteBatch.recorded(chosen, TOPOLOGY).check_fed(fed)


EXPERTS, VALID = torch.zeros((2, 3, 2), dtype=torch.uint8), torch.ones((2, 3), dtype=torch.bool)


@pytest.mark.parametrize(
    ("layers", "experts", "valid", "problem"),
    [
        ((1, 2), EXPERTS, VALID[:, :2], "inconsistent shapes"),
        ((1,), EXPERTS, VALID, "inconsistent shapes"),
        ((1, 2), EXPERTS[0], VALID, "inconsistent shapes"),
        ((1, 2), EXPERTS.long(), VALID, "uint8 or int16"),
        ((1, 2), EXPERTS, VALID.int(), "uint8 or int16"),
        ((2, 1), EXPERTS, VALID, "increasing"),
        ((1, 1), EXPERTS, VALID, "increasing"),
    ],
    ids=["rows", "layers", "dimensions", "wide ids", "flags that are numbers", "order", "a layer twice"],
)
def test_parts_that_do_not_fit_are_refused(
    layers: tuple[int, ...], experts: torch.Tensor, valid: torch.Tensor, problem: str
) -> None:
    with pytest.raises(AlignmentError, match=problem):
        RouteBatch(layers=layers, routed_experts=experts, valid=valid, all_valid=(True, True), source_layers=(1, 2))


def test_ids_of_routers_of_another_framework_are_narrowed() -> None:
    routed_experts = {layer: torch.tensor([[0, 1], [2, 3]]) for layer in TOPOLOGY.layers}
    batch = RouteBatch.recorded(routed_experts, TOPOLOGY)
    assert batch.routed_experts.dtype == torch.uint8
    assert torch.equal(batch.layer(TOPOLOGY.layers[0])[0].long(), routed_experts[TOPOLOGY.layers[0]])
