"""A gallery of planted faults: every way in which routing replay is known to have gone wrong, each found and named.

The faults are in tests/verification/faults.py. Their numbers are those of `KNOWN_BUGS` at the end: bugs that were
reported against published implementations.
"""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.verification.alignment_verdict import Cause, judge
from moe_replay.verification.verify import compare, verify
from moe_replay.verification.watch import AlignmentWatch
from tests.models import perturb_routers, tiny_qwen3_moe
from tests.verification.faults import (
    GALLERY,
    LENGTHS,
    Traces,
    capture_never_bound_rows_filled,
    dense_layer_counted_as_a_router,
    physical_ids_of_a_load_balancer,
    pipeline_stages_reversed,
    prediction_head_shares_the_number_of_a_layer,
    resumed_rollout_appends_all_routes_again,
    routes_dropped_on_the_way,
    rows_of_the_next_token,
    second_virtual_chunk_offset_by_a_dense_layer,
    shard_of_one_rank_taken_for_the_whole,
    three_dense_layers_counted_as_routers,
    two_samples_exchanged,
)
from tests.verification.routes import healthy, with_routes

pytestmark = pytest.mark.usefixtures("fast_bfloat16")

# ---- each is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("planted", GALLERY, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found_and_named(planted):
    native, replayed = healthy(0, LENGTHS)
    assert compare(native, replayed).aligned
    report = compare(native, planted.plant(replayed))
    verdict = report.verdict
    assert verdict.status == "misaligned"
    assert verdict.cause == planted.cause, report
    _check_words(planted, verdict)
    with pytest.raises(mr.AlignmentError) as raised:
        report.raise_if_misaligned()
    assert raised.value.remedy


def _check_words(planted, verdict):
    assert planted.says in re.sub("expert 3[2-9]", "expert 3x", verdict.detail)
    assert planted.layers in (None, verdict.layers)
    assert planted.samples in (None, verdict.samples)


# ---- and nothing else is ---------------------------------------------------------------------------------------------


def healthy_case(seed: int) -> tuple[Traces, Traces]:
    """Sizes, noise and correlations at random: 8 to 512 experts, top 1 to 10; up to half of the experts differ."""
    chance = np.random.default_rng([7, seed])
    experts = int(chance.choice([8, 16, 60, 64, 128, 256, 384, 512]))
    lengths = chance.integers(4, 100, size=chance.integers(1, 5)).tolist()
    return healthy(
        seed,
        lengths,
        noise=float(chance.choice([0.0, 0.05, 0.15, 0.3])),
        alike=float(chance.choice([0.0, 0.5, 0.9, 0.99])),
        layers=int(chance.integers(1, 9)),
        num_experts=experts,
        top_k=int(chance.integers(1, min(10, experts - 1) + 1)),
        skew=float(chance.choice([0.0, 0.5, 2.0])),
    )


@pytest.mark.slow
@pytest.mark.whole_runs
def test_no_false_alarm_over_200_healthy_cases():
    watch, seen = AlignmentWatch(), {"whole": [], "watch": []}
    for seed in range(200):
        native, replayed = healthy_case(seed)
        seen["whole"].append(compare(native, replayed).verdict)
        layout = mr.TokenLayout.padded([len(t) for t in native]).sequence_major()
        ours, theirs = mr.RouteBatch.from_traces(native, layout), mr.RouteBatch.from_traces(replayed, layout)
        seen["watch"].append(judge(watch.measure(ours, theirs, layout, step=seed)))
    for verdicts in seen.values():
        assert [str(v) for v in verdicts if v.status == "misaligned"] == []
        assert sum(v.aligned for v in verdicts) > 150  # and not because nothing is ever judged


@pytest.mark.parametrize("seed", range(8))
def test_routes_of_other_tokens_are_found_at_many_sizes(seed):
    """The same cases are found out when the sequences are longer and their routes are exchanged."""
    chance = np.random.default_rng(seed)
    experts = [8, 16, 64, 128, 256, 512][seed % 6]
    sizes = {"layers": int(chance.integers(1, 9)), "num_experts": experts, "top_k": int(chance.integers(1, 7))}
    native, replayed = healthy(seed, (150, 150), **sizes)
    exchanged = [with_routes(a, b.routed_experts, b.valid) for a, b in zip(replayed, reversed(replayed), strict=True)]
    verdict = compare(native, exchanged).verdict
    assert (verdict.status, verdict.cause) == ("misaligned", Cause.OTHER_SAMPLE)
    assert verdict.detail.startswith("sample 0 has the routes of sample 1, sample 1 has the routes of sample 0")


@pytest.mark.parametrize("place", [0, -2])  # the last token has no route
def test_one_made_up_row_in_each_sample_is_found(place):  # bug 20
    """Rows filled with experts at random, which look like any other."""
    native, replayed = healthy(0, (20,) * 16)
    chance, spoilt = np.random.default_rng(0), []
    for trace in replayed:
        experts = trace.routed_experts.copy()
        experts[place] = [chance.permutation(32)[:4] for _ in trace.layers]
        spoilt.append(with_routes(trace, experts))
    verdict = compare(native, spoilt).verdict
    assert verdict.status == "misaligned"
    assert "in single tokens of samples 0, 1, 2" in verdict.detail


def test_a_part_in_the_middle_of_a_sample_is_named_with_both_ends():
    native, replayed = healthy(0, LENGTHS)
    experts = replayed[1].routed_experts.copy()
    experts[30:60] = experts[21:51]
    verdict = compare(native, [replayed[0], with_routes(replayed[1], experts), *replayed[2:]]).verdict
    assert verdict.detail == "routes are 9 tokens late in sample 1, tokens 30 to 59"


def test_routes_without_a_number_of_experts_are_compared():
    native, replayed = healthy(0, LENGTHS)
    unknown = [
        [mr.RouteTrace(t.token_ids, t.routed_experts, t.layers, t.valid) for t in part] for part in (native, replayed)
    ]
    assert compare(*unknown).aligned
    few = [with_routes(t, t.routed_experts % 4 * 0 + np.arange(4)) for t in unknown[1]]  # ids below those of the model
    assert compare(unknown[0], few).verdict.cause == Cause.EMPTY_CAPTURE


def test_truncated_coverage_is_no_fault_but_is_named():
    native, replayed = healthy(0, LENGTHS)
    cut = [with_routes(t, t.routed_experts, t.valid & (np.arange(len(t)) < 60)[:, None]) for t in replayed]
    report = compare(native, cut)
    assert report.aligned
    assert "truncated traces" in str(report)
    assert "from token 60 of 96 on in sample 0" in str(report)
    bare = [with_routes(t, t.routed_experts, t.valid & (np.array(t.layers) != 3)) for t in replayed]
    assert compare(native, bare).notes == ("no routes in layer 3",)


# ---- faults that are refused before anything is compared -------------------------------------------------------------


def test_zeros_of_an_empty_capture_are_no_trace():  # bugs 16, 27
    with pytest.raises(mr.errors.TraceError, match=r"an expert occurs twice in one row.*unwritten capture buffer"):
        mr.RouteTrace([5, 6], np.zeros((2, 8, 4), int), range(1, 9), num_experts=32)


def test_ids_cut_to_eight_bits_and_physical_ids_are_no_trace():  # bug 27
    with pytest.raises(mr.errors.TraceError, match="300"):
        mr.RouteTrace([5], [[[300, 1]]], [1], num_experts=256)


def test_routes_longer_than_the_truncated_response_are_refused():  # bugs 11, 18
    native, replayed = healthy(0, (40, 30))
    with pytest.raises(mr.AlignmentError, match="other tokens than the model was fed"):
        compare([native[0][:35], native[1]], replayed)
    with pytest.raises(mr.AlignmentError, match="another length than the layout"):
        mr.RouteBatch.from_traces(replayed, mr.TokenLayout.padded([35, 30]))


def test_another_top_k_and_all_decoder_layers_are_refused():  # bugs 1, 41
    native, _ = healthy(0, (20,))
    with pytest.raises(mr.AlignmentError, match=r"top 4.*top 2"):
        compare(native, healthy(0, (20,), top_k=2)[1])
    with pytest.raises(mr.AlignmentError, match="other routers than the model has"):
        compare(native, healthy(0, (20,), layers=9)[1])


def test_padding_rows_never_follow_routes():  # bugs 17, 20
    _, replayed = healthy(0, (20, 5))
    batch = mr.RouteBatch.from_traces(replayed, mr.TokenLayout.padded([20, 5]))
    assert not batch.valid[:, 24:].any()
    assert batch.coverage is not None
    assert batch.coverage.native == 2 * 8


# ---- on real models --------------------------------------------------------------------------------------------------

REAL_LENGTHS = (90, 75, 60, 84)


@pytest.fixture(scope="module")
def rollout():
    """A model of 8 MoE layers after a dense one, and what it routed in float32: the trainer runs it in bfloat16."""
    model = tiny_qwen3_moe(num_hidden_layers=9, num_experts=32, num_experts_per_tok=4)
    chance = np.random.default_rng(0)
    ids = [chance.integers(1, 97, length) for length in REAL_LENGTHS]
    layout = mr.TokenLayout.padded(REAL_LENGTHS)
    replay = mr.attach(model)
    with torch.no_grad(), replay.record() as recording:
        model(input_ids=torch.from_numpy(layout.fed_token_ids(ids, pad=0)).long())
    traces = [
        with_routes(t, t.routed_experts, np.arange(len(t)) < len(t) - 1)
        for t in recording.traces(layout, [i.tolist() for i in ids])
    ]
    replay.detach()
    return model.to(torch.bfloat16), traces


def test_a_healthy_model_is_verified(rollout):
    model, traces = rollout
    model.train()
    report = verify(model, traces, batch_size=3)
    assert model.training  # as it was
    model.eval()
    assert report.aligned
    assert 0.8 < min(report.layer_agreement.values()) < 1  # bfloat16 is not float32
    assert list(report.layer_agreement) == list(range(1, 9))
    mr.attach(model).detach()  # and nothing is left on the model


REAL = [
    dense_layer_counted_as_a_router,
    second_virtual_chunk_offset_by_a_dense_layer,
    pipeline_stages_reversed,
    prediction_head_shares_the_number_of_a_layer,
    rows_of_the_next_token,
    resumed_rollout_appends_all_routes_again,
    two_samples_exchanged,
    physical_ids_of_a_load_balancer,
    capture_never_bound_rows_filled,
    shard_of_one_rank_taken_for_the_whole,
    routes_dropped_on_the_way,
]


@pytest.mark.parametrize("plant", REAL, ids=lambda plant: plant.__name__)
def test_a_fault_planted_in_a_rollout_is_found_by_the_model(rollout, plant):
    model, traces = rollout
    (planted,) = [one for one in GALLERY if one.plant is plant]
    verdict = verify(model, plant(traces)).verdict
    assert (verdict.status, verdict.cause) == ("misaligned", planted.cause)


def test_samples_of_an_engine_and_an_attached_model(rollout):
    class HoldsTrace:
        def __init__(self, trace):
            self.trace = trace

    model, traces = rollout
    replay = mr.attach(model)
    assert verify(model, [HoldsTrace(t) for t in traces], replay=replay).aligned
    with pytest.raises(mr.AlignmentError, match="other decoder layers"):
        verify(model, [t.select_layers(range(1, 8)) for t in traces], replay=replay)
    replay.detach()


def test_a_decoder_built_twice_is_refused():  # bugs 3, 4, 5
    """Orphan routers, built first: a list of routers in the order of construction would drive them in vain."""
    model = tiny_qwen3_moe()
    running = model.model
    del model.model
    model.orphan = copy.deepcopy(running)
    model.model = running
    with pytest.raises(mr.errors.UnsupportedRouterError, match="orphan"):
        mr.attach(model)


# ---- in training -----------------------------------------------------------------------------------------------------


def in_training(model, traces: Traces, layout: mr.TokenLayout):
    """(native, given) of one replayed micro-batch."""
    replay = mr.attach(model)
    replayed = mr.RouteBatch.from_traces(traces, layout)
    fed = torch.from_numpy(layout.fed_token_ids([t.token_ids for t in traces], pad=0)).long()
    mask = torch.from_numpy(layout.fed >= 0).long()
    with torch.no_grad(), replay.replay(replayed, observe=True) as replaying:
        model(input_ids=fed, attention_mask=mask)
    native = replaying.native()
    replay.detach()
    return native, replayed


WATCHED = [
    (second_virtual_chunk_offset_by_a_dense_layer, "routes are one layer late from layer 5 on"),
    (rows_of_the_next_token, "routes are one token late in all layers"),
    (capture_never_bound_rows_filled, "no better than chance"),
    (two_samples_exchanged, "2 of 4 sequences looked at"),
]


@pytest.mark.parametrize(("plant", "says"), WATCHED, ids=lambda value: getattr(value, "__name__", None))
def test_the_watch_stops_a_run(rollout, plant, says):
    model, traces = rollout
    layout = mr.TokenLayout.padded(REAL_LENGTHS, side="left")
    watch = AlignmentWatch(layers=8, tokens=64)
    assert judge(watch.measure(*in_training(model, traces, layout), layout, step=0)).aligned
    batches = in_training(model, plant(traces), layout)
    verdict = judge(watch.measure(*batches, layout, step=0))
    assert says in verdict.detail
    (planted,) = [one for one in GALLERY if one.plant is plant]
    assert watch.explain(*batches, layout).verdict.cause == planted.cause
    with pytest.raises(mr.AlignmentError, match=says):
        verdict.raise_if_misaligned()


def test_a_router_moved_by_training_is_still_aligned(rollout):
    model, traces = copy.deepcopy(rollout[0]), rollout[1]
    replay = mr.attach(model)
    perturb_routers(replay, scale=0.4)
    replay.detach()
    report = verify(model, traces)
    assert report.aligned
    assert min(report.layer_agreement.values()) < 0.8


@pytest.mark.parametrize("plant", [None, rows_of_the_next_token, three_dense_layers_counted_as_routers])
def test_every_rank_comes_to_the_same_verdict(plant):
    """Two pipeline stages, each of two sequence parallel ranks, of two data parallel shares."""
    native, replayed = healthy(0, LENGTHS)
    replayed = plant(replayed) if plant else replayed
    watch, vectors, table = AlignmentWatch(layers=2), [], None
    for share in (slice(0, 2), slice(2, 4)):
        whole = mr.TokenLayout.padded([len(t) for t in native[share]], 96).sequence_major()
        for rank in range(2):
            layout = whole.sequence_parallel(rank, 2)
            for stage in (range(1, 5), range(5, 9)):
                # `replay` takes a stage's layers out of a batch of all layers, and so does the watch.
                ours = mr.RouteBatch.from_traces(native[share], layout, stage)
                theirs = mr.RouteBatch.from_traces(replayed[share], layout)
                table = watch.measure(ours, theirs, layout, step=3)
                vectors.append(table.vector())
    assert table is not None
    layout, topology = mr.TokenLayout.padded([3]), _topology(native[0])
    without_routers = mr.RouteBatch.recorded({}, topology)
    vectors.append(
        watch.measure(without_routers, mr.RouteBatch.from_traces([replayed[0][:3]], layout), layout, 3).vector()
    )
    verdict = judge(table.with_vector(torch.stack(vectors).sum(0)))
    assert verdict.status == ("misaligned" if plant else "aligned")
    assert len({vector.shape for vector in vectors}) == 1


def _topology(trace: mr.RouteTrace) -> mr.MoeTopology:
    moe = tuple(mr.routes.MoeLayer(layer, trace.num_experts or 0, trace.top_k) for layer in trace.layers)
    return mr.MoeTopology(num_layers=9, moe_layers=moe)


def test_the_watch_looks_elsewhere_in_each_step():
    native, replayed = healthy(0, LENGTHS)
    layout = mr.TokenLayout.packed(LENGTHS)
    ours, theirs = mr.RouteBatch.from_traces(native, layout), mr.RouteBatch.from_traces(replayed, layout)
    watch = AlignmentWatch(layers=2, sequences=2, tokens=10)
    tables = [watch.measure(ours, theirs, layout, step) for step in range(12)]
    looked_at = [tuple(np.flatnonzero(table.counts.sum((1, 2))).tolist()) for table in tables]
    assert {layer for layers in looked_at for layer in layers} == set(range(8))
    assert all(len(layers) == 2 for layers in looked_at)
    assert all(table.counts[:, 2, 2].max() <= 20 for table in tables)
    again = watch.measure(ours, theirs, layout, 5)
    assert torch.equal(again.vector(), tables[5].vector())


# ---- what has gone wrong elsewhere -----------------------------------------------------------------------------------

# Bugs reported against published implementations of routing replay, by number. Those without a planted fault are no
# misplaced routes: what keeps them out, or why they are not ours, stands here.
KNOWN_BUGS: dict[int, str] = {
    1: "dense layers shift every layer after them",
    2: "offset of virtual pipeline chunks",
    3: "the decoder is built twice: routers that never run are driven (test_a_decoder_built_twice...)",
    4: "the same on another model (test_a_decoder_built_twice...)",
    5: "order of construction taken for order of layers",
    6: "alignment padding of packed sequences",
    7: "a context parallel rank reads an empty slice",
    8: "contiguous context parallel layout",
    9: "FP8 padding missing in the routes",
    10: "resumed rollouts",
    11: "response truncated, routes not",
    12: "only the last turn's routes are kept",
    13: "routes dropped on the way",
    14: "not planted: an assertion that fails aloud",
    15: "not planted: a setting that is refused aloud",
    16: "an expert twice in a row (test_zeros_of_an_empty_capture_are_no_trace)",
    17: "padding rows all go to expert 0 (test_padding_rows_never_follow_routes)",
    18: "routes of an earlier pass in the next backward",
    19: "batch-first routes for sequence-first rows",
    20: "what the last token and padding are filled with",
    21: "an aborted turn leaves a gap",
    22: "multi-token prediction shares layer numbers",
    23: "not planted: a false assertion that fails aloud",
    24: "not planted: a question nobody could answer without a measure of agreement",
    25: "dense layers, context parallel by all-gather",
    26: "not planted: gradients of gates, tests/replay/adapters/test_gates.py",
    27: "capture never bound, physical ids",
    28: "physical ids, one rank's share taken for the whole",
    29: "buffers of hybrid caches too small",
    30: "not planted: shared memory that runs out, aloud",
    31: "rows of another data parallel rank",
    32: "a draft router overwrites the first layer",
    33: "stale rows of a cached prefix",
    34: "not planted: four designs of one engine within a year",
    35: "not planted: a crash",
    36: "not planted: a hang",
    37: "prompt rows all zero",
    38: "a snapshot overwritten by the next batch",
    39: "the request for routes stripped by a gateway",
    40: "not planted: routes of older weights are real routes; traces hold the weight version of every token",
    41: "another name of top-k (test_another_top_k_and_all_decoder_layers_are_refused)",
}


def test_every_known_bug_is_planted_or_answered():
    planted = {bug for one in GALLERY for bug in one.bugs}
    answered = {bug for bug, text in KNOWN_BUGS.items() if text.startswith("not planted") or "(test_" in text}
    assert sorted(KNOWN_BUGS) == list(range(1, 42))
    assert planted | answered == set(KNOWN_BUGS)
    named = {name.rstrip(".") for text in KNOWN_BUGS.values() for name in re.findall(r"\((test_\w+)", text)}
    assert all(any(known.startswith(name) for known in globals()) for name in named)
