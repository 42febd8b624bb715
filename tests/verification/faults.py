"""Faults to plant in healthy traces: every known way to misplace routes, and what each must be called.

The numbers are those of `KNOWN_BUGS` in tests/verification/test_verify_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

import moe_replay as mr
from moe_replay.verification.alignment_verdict import Cause
from tests.verification.routes import Routers, with_routes

LENGTHS = (96, 81, 75, 88)
Traces = list[mr.RouteTrace]
Style = Literal["zigzag", "contiguous"]
GALLERY: list[Fault] = []


@dataclass(frozen=True)
class Fault:
    """A way to spoil healthy traces, what it must be recognised as, and words that must be said."""

    name: str
    bugs: tuple[int, ...]
    plant: Callable[[Traces], Traces]
    cause: Cause
    says: str
    layers: tuple[int, ...] | None = None
    samples: tuple[int, ...] | None = None


def fault(bugs: Sequence[int], cause: Cause, says: str, **where):
    """Put a fault into the gallery."""

    def put(plant):
        GALLERY.append(Fault(plant.__name__, tuple(bugs), plant, cause, says, **where))
        return plant

    return put


def filler(trace: mr.RouteTrace) -> np.ndarray:
    """What an engine that fills rows with distinct experts puts there."""
    return np.arange(trace.top_k)


def moved(trace: mr.RouteTrace, source: np.ndarray) -> mr.RouteTrace:
    """Each token has the routes of token `source`; -1: none."""
    valid = trace.valid[source] & (source >= 0)[:, None]
    return with_routes(trace, np.where(valid[..., None], trace.routed_experts[source], 0), valid)


def lengths_of(traces: Traces) -> list[int]:
    return [len(trace) for trace in traces]


def laid_out_otherwise(traces: Traces, recorded: mr.TokenLayout, read: mr.TokenLayout) -> Traces:
    """Routes written row by row in one layout and read in another: shapes are the same."""
    batch = mr.RouteBatch.from_traces(traces, recorded)
    return batch.to_traces([trace.token_ids for trace in traces], read, unverified=True)


# ---- layers ----------------------------------------------------------------------------------------------------------


@fault([1, 25], Cause.LAYER_SHIFT, "routes are one layer late in all layers")
def dense_layer_counted_as_a_router(traces):
    """The engine reports the dense layer 0 too, and the trainer numbers its routers from 0."""
    return [
        with_routes(
            t, np.concatenate([np.broadcast_to(filler(t), t.routed_experts[:, :1].shape), t.routed_experts[:, :-1]], 1)
        )
        for t in traces
    ]


@fault([1], Cause.LAYER_SHIFT, "routes are 3 layers late in all layers")
def three_dense_layers_counted_as_routers(traces):
    return [with_routes(t, np.roll(t.routed_experts, 3, 1)) for t in traces]


@fault([2], Cause.LAYER_SHIFT, "routes are one layer late from layer 5 on", layers=(5, 6, 7, 8))
def second_virtual_chunk_offset_by_a_dense_layer(traces):
    return [with_routes(t, t.routed_experts[:, [0, 1, 2, 3, 3, 4, 5, 6]]) for t in traces]


@fault([2], Cause.LAYER_SHIFT, "routes are two layers early up to layer 4", layers=(1, 2, 3, 4))
def first_stage_takes_a_slice_that_begins_too_late(traces):
    return [with_routes(t, t.routed_experts[:, [2, 3, 4, 5, 4, 5, 6, 7]]) for t in traces]


@fault([2], Cause.CHUNKS_REVERSED, "pipeline chunks are in reverse order: layer 1 has those of 5")
def pipeline_stages_reversed(traces):
    return [with_routes(t, t.routed_experts[:, [4, 5, 6, 7, 0, 1, 2, 3]]) for t in traces]


@fault([2], Cause.CHUNKS_REVERSED, "pipeline chunks are in reverse order: layer 1 has those of 7")
def virtual_chunks_reversed(traces):
    return [with_routes(t, t.routed_experts[:, [6, 7, 4, 5, 2, 3, 0, 1]]) for t in traces]


@fault([2, 5], Cause.LAYER_ORDER, "layer 3 has those of 5", layers=(3, 4, 5, 6))
def virtual_chunks_in_the_order_of_construction(traces):
    return [with_routes(t, t.routed_experts[:, [0, 1, 4, 5, 2, 3, 6, 7]]) for t in traces]


@fault([22], Cause.LAYER_ORDER, "layer 8 has those of 3", layers=(8,))
def prediction_head_shares_the_number_of_a_layer(traces):
    return [with_routes(t, t.routed_experts[:, [0, 1, 2, 3, 4, 5, 6, 2]]) for t in traces]


@fault([32, 22], Cause.OTHER_ROUTERS, "routes in layer 1 are of other routers", layers=(1,))
def draft_router_overwrites_the_first_layer(traces):
    draft = Routers(99, layers=1).route(Routers(98).tokens(lengths_of(traces)))
    return [
        with_routes(t, np.concatenate([d.routed_experts, t.routed_experts[:, 1:]], 1))
        for t, d in zip(traces, draft, strict=True)
    ]


# ---- tokens of one sample --------------------------------------------------------------------------------------------


@fault([11, 20], Cause.TOKEN_SHIFT, "routes are one token late")
def rows_of_the_next_token(traces):
    """Routes of token t predict token t + 1; some keep them with the token that was predicted."""
    return [moved(t, np.arange(-1, len(t) - 1)) for t in traces]


@fault([11], Cause.TOKEN_SHIFT, "routes are 17 tokens early")
def response_cut_at_the_end_and_routes_at_the_start(traces):
    return [moved(t, np.append(np.arange(17, len(t)), [-1] * 17)) for t in traces]


@fault([10], Cause.TOKEN_SHIFT, "routes are 31 tokens late in sample 1 from token 31 on", samples=(1,))
def resumed_rollout_appends_all_routes_again(traces):
    """A sample is interrupted after 31 tokens; the engine then returns the routes of the whole sequence."""
    again = moved(traces[1], np.append(np.arange(31), np.arange(len(traces[1]) - 31)))
    return [traces[0], again, *traces[2:]]


@fault([12], Cause.TOKEN_SHIFT, "routes are 40 tokens early")
def last_turn_overwrites_the_first(traces):
    return [moved(t, np.append(np.arange(40, len(t)), np.full(40, -1))) for t in traces]


@fault([21], Cause.TOKEN_SHIFT, r"routes are 9 tokens early in samples 0, 1, 2, 3 from token 30 on")
def aborted_turn_leaves_a_gap_that_the_merge_closes(traces):
    return [moved(t, np.append(np.arange(30), np.append(np.arange(39, len(t)), [-1] * 9))) for t in traces]


@fault([20], Cause.EMPTY_CAPTURE, "in single tokens of samples 0, 1, 2, 3: routes name experts [0, 1, 2, 3]")
def last_token_made_up(traces):
    made = []
    for trace in traces:
        experts, valid = trace.routed_experts.copy(), trace.valid.copy()
        experts[-1], valid[-1] = filler(trace), True
        made.append(with_routes(trace, experts, valid))
    return made


# ---- rows of a micro-batch -------------------------------------------------------------------------------------------


@fault([19], Cause.TRANSPOSED, "routes are batch-first where rows are sequence-first, in micro-batches of 4")
def batch_first_routes_for_sequence_first_rows(traces):
    layout = mr.TokenLayout.padded(lengths_of(traces))
    return laid_out_otherwise(traces, layout, layout.sequence_major())


@fault([19], Cause.TRANSPOSED, "routes are sequence-first where rows are batch-first, in micro-batches of 2")
def sequence_first_routes_for_batch_first_rows(traces):
    made = []
    for pair in (traces[:2], traces[2:]):
        layout = mr.TokenLayout.padded([len(t) for t in pair])
        made += laid_out_otherwise(pair, layout.sequence_major(), layout)
    return made


@fault([6, 9, 18], Cause.TOKEN_SHIFT, "15 tokens early in sample 2, 36 tokens early in sample 3", samples=(2, 3))
def padding_of_packed_sequences_left_out_of_the_routes(traces):
    padded = mr.TokenLayout.packed(lengths_of(traces), pad_each_to_multiple_of=32)
    tight = mr.TokenLayout.packed(lengths_of(traces)).pad_to(padded.num_rows)
    return laid_out_otherwise(traces, tight, padded)


@fault([6, 20], Cause.TOKEN_SHIFT, "routes are displaced otherwise in each sample: 15 tokens early in sample 1")
def padded_on_the_other_side(traces):
    return laid_out_otherwise(
        traces, mr.TokenLayout.padded(lengths_of(traces)), mr.TokenLayout.padded(lengths_of(traces), side="left")
    )


@fault([8, 25], Cause.CONTEXT_PARALLEL, "routes are cut contiguous over 2 context parallel ranks")
def contiguous_routes_for_zigzag_tokens(traces):
    return [_cut_otherwise(t, "contiguous", "zigzag") for t in traces]


@fault([8], Cause.CONTEXT_PARALLEL, "routes are cut zigzag over 2 context parallel ranks")
def zigzag_routes_for_contiguous_tokens(traces):
    return [_cut_otherwise(t, "zigzag", "contiguous") for t in traces]


def _cut_otherwise(trace: mr.RouteTrace, recorded: Style, read: Style) -> mr.RouteTrace:
    whole = mr.TokenLayout.padded([len(trace)]).pad_to(multiple_of=4)
    cuts = [[whole.context_parallel(rank, 2, style) for style in (recorded, read)] for rank in range(2)]
    return mr.RouteTrace.merge([laid_out_otherwise([trace], *cut)[0] for cut in cuts])


@fault([38, 18], Cause.OTHER_SAMPLE, "sample 0 has the routes of sample 3", samples=(0, 3))
def two_samples_exchanged(traces):
    first, last = traces[0], traces[3]
    swapped = first.routed_experts.copy(), first.valid.copy()
    swapped[0][: len(last)], swapped[1][: len(last)] = last.routed_experts, last.valid
    swapped[1][len(last) :] = False
    return [with_routes(first, *swapped), *traces[1:3], with_routes(last, first.routed_experts[: len(last)])]


@fault([18, 31], Cause.OTHER_TOKENS, "of other tokens, none of these samples: of another micro-batch")
def another_micro_batch(traces):
    other = Routers(0).route(Routers(5).tokens(lengths_of(traces)))
    return [with_routes(t, o.routed_experts) for t, o in zip(traces, other, strict=True)]


@fault([33], Cause.OTHER_TOKENS, "in samples 0, 1, 2, 3 are of other tokens")
def stale_rows_of_a_cached_prefix(traces):
    other = Routers(0).route(Routers(5).tokens(lengths_of(traces)))
    return [
        with_routes(t, np.concatenate([o.routed_experts[:40], t.routed_experts[40:]]))
        for t, o in zip(traces, other, strict=True)
    ]


# ---- what was captured -----------------------------------------------------------------------------------------------


@fault([27, 28, 3], Cause.PHYSICAL_IDS, "expert ids are renamed in all layers: physical ids")
def physical_ids_of_a_load_balancer(traces):
    chance = np.random.default_rng(1)
    physical = np.stack([chance.permutation(32) for _ in range(8)])
    slots = np.arange(8)[:, None]
    return [with_routes(t, physical[slots, t.routed_experts]) for t in traces]


@fault([27], Cause.PHYSICAL_IDS, "routes name expert 3x while the routers have 32: physical expert ids")
def physical_ids_of_redundant_experts(traces):
    chance = np.random.default_rng(1)
    physical = np.stack([chance.permutation(40)[:32] for _ in range(8)])
    slots = np.arange(8)[:, None]
    return [
        mr.RouteTrace(
            t.token_ids, physical[slots, t.routed_experts], t.layers, t.valid
        )  # nobody says of how many experts
        for t in traces
    ]


@fault([27, 20], Cause.EMPTY_CAPTURE, "nothing was captured in all layers: routes name experts [0, 1, 2, 3]")
def capture_never_bound_rows_filled(traces):
    return [with_routes(t, np.broadcast_to(filler(t), t.routed_experts.shape)) for t in traces]


@fault([27], Cause.EMPTY_CAPTURE, "nothing was captured in layers 3, 4: routes name", layers=(3, 4))
def capture_bound_in_some_layers_only(traces):
    made = []
    for trace in traces:
        experts = trace.routed_experts.copy()
        experts[:, 2:4] = filler(trace)
        made.append(with_routes(trace, experts))
    return made


@fault([37], Cause.EMPTY_CAPTURE, "nothing was captured in all layers in samples 0, 1, 2, 3: routes name")
def prompt_never_captured(traces):
    return [
        with_routes(t, np.where(np.arange(len(t))[:, None, None] < 20, filler(t), t.routed_experts)) for t in traces
    ]


@fault([7, 28, 29], Cause.TRUNCATED, "routes end early: at token 48 of 96 in sample 0, at token 40 of 81 in sample 1")
def shard_of_one_rank_taken_for_the_whole(traces):
    return [
        with_routes(t, np.where(np.arange(len(t))[:, None, None] < len(t) // 2, t.routed_experts, filler(t)))
        for t in traces
    ]


@fault([13, 39], Cause.NOTHING_RECORDED, "no sample has a single recorded route")
def routes_dropped_on_the_way(traces):
    return [with_routes(t, t.routed_experts, np.zeros(len(t), bool)) for t in traces]
