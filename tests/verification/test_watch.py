"""The watch of every step: faults confined to completions, evidence over steps, and no alarm without a fault."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import moe_replay as mr
from moe_replay.routes.topology import MoeLayer
from moe_replay.verification.alignment_verdict import Cause, judge
from moe_replay.verification.sequential import (
    COUNTS_SHAPE,
    FALSE_ALARMS,
    NUM_ALTERNATIVES,
    PROMPT,
    SAMPLED,
    SHIFTS,
    UNKNOWN,
    WEALTH_SHAPE,
    EvidenceHistory,
    RowSample,
    unit_evidence,
)
from moe_replay.verification.verify import compare
from moe_replay.verification.watch import AlignmentWatch
from tests.models import tiny_qwen3_moe
from tests.verification.faults import moved
from tests.verification.routes import Routers, healthy, siblings, with_routes

pytestmark = pytest.mark.usefixtures("fast_bfloat16")

PROMPT_TOKENS = 30


def batches(native, replayed):
    layout = mr.TokenLayout.padded([len(trace) for trace in native])
    return mr.RouteBatch.from_traces(native, layout), mr.RouteBatch.from_traces(replayed, layout), layout


def sampled_tokens(layout: mr.TokenLayout, prompt: int = PROMPT_TOKENS) -> np.ndarray:
    return np.concatenate([np.arange(length) >= prompt for length in layout.lengths])


def measure(native, replayed, step: int, watch: AlignmentWatch | None = None):
    ours, theirs, layout = batches(native, replayed)
    return (watch or AlignmentWatch()).measure(ours, theirs, layout, step, sampled_tokens(layout))


# ---- faults that token ids, shapes and prompts cannot show -----------------------------------------------------------


def some(traces, share: float, chance):
    return chance.permutation(len(traces))[: max(1, round(share * len(traces)))].tolist()


def completions_of_siblings(traces, share, chance):
    spoilt = list(traces)
    for one in some(traces, share, chance):
        experts = traces[one].routed_experts.copy()
        experts[PROMPT_TOKENS:] = traces[(one + 1) % len(traces)].routed_experts[PROMPT_TOKENS:]
        spoilt[one] = with_routes(traces[one], experts)
    return spoilt


def rows_of_siblings(traces, share, chance):
    spoilt = []
    for one, trace in enumerate(traces):
        wrong = (chance.random(len(trace)) < share) & (np.arange(len(trace)) >= PROMPT_TOKENS) & trace.valid[:, 0]
        other = traces[(one + 1) % len(traces)].routed_experts
        spoilt.append(with_routes(trace, np.where(wrong[:, None, None], other, trace.routed_experts)))
    return spoilt


def late_completions(traces, share, chance, by=1):
    spoilt = list(traces)
    for one in some(traces, share, chance):
        position = np.arange(len(traces[one]))
        spoilt[one] = moved(traces[one], np.where(position < PROMPT_TOKENS, position, position - by))
    return spoilt


def late_by_a_period(traces, share, chance):
    return late_completions(traces, share, chance, by=6)


def late_by_two(traces, share, chance):
    return late_completions(traces, share, chance, by=2)


def one_route_for_all_sampled_tokens(traces, *_):
    spoilt = []
    for trace in traces:
        experts = trace.routed_experts.copy()
        experts[PROMPT_TOKENS:] = experts[PROMPT_TOKENS]
        spoilt.append(with_routes(trace, experts))
    return spoilt


def foreign(traces, chance) -> np.ndarray:
    """(T, L, K) routes of tokens drawn from all sequences."""
    known = np.concatenate([trace.routed_experts[:-1] for trace in traces])
    return known[chance.integers(0, len(known), len(traces[0]))]


def every_second_token_foreign(traces, _, chance):
    odd = (np.arange(len(traces[0])) % 2 == 1)[:, None, None]
    return [
        with_routes(t, np.where(odd & t.valid[..., None], foreign(traces, chance), t.routed_experts), t.valid)
        for t in traces
    ]


def half_the_layers_of_two(traces, _, chance):
    spoilt = list(traces)
    for one in (1, 4):
        experts = traces[one].routed_experts.copy()
        experts[:-1, ::2] = foreign(traces, chance)[:-1, ::2]
        spoilt[one] = with_routes(traces[one], experts)
    return spoilt


FEW = {"layers": 3, "num_experts": 8, "top_k": 2}
FP8 = {"noise": 0.3}  # 78 % of the experts the same
CLOSE = {"alike": 0.9}  # one token off, 67 % of the experts are the same
FAULTS = [  # fault, share, routers, refused within so many steps, what is said
    (completions_of_siblings, 0.1, {}, 1, ""),
    (completions_of_siblings, 0.5, {}, 1, ""),
    (completions_of_siblings, 0.5, FP8, 1, ""),
    (completions_of_siblings, 0.1, FEW, 8, "sampled tokens are those of other sequences"),
    (rows_of_siblings, 0.5, {}, 2, "sampled tokens are those of other sequences in some rows"),
    (rows_of_siblings, 0.1, {}, 8, "in some rows"),
    (late_completions, 0.2, {}, 1, ""),
    (late_completions, 0.5, FP8, 1, ""),
    (late_completions, 0.2, CLOSE, 3, "sampled tokens are one token late"),
    (late_completions, 0.5, FEW, 2, "sampled tokens are one token late"),
    (late_by_a_period, 1.0, {"period": 6}, 1, "sampled tokens are 6 tokens late"),
    (late_by_two, 1.0, {"period": 2}, 1, "sampled tokens are two tokens late"),
    (late_by_two, 1.0, {"period": 2, **FEW}, 8, "sampled tokens are two tokens late"),
    (late_completions, 1.0, {"period": 1}, 1, "sampled tokens are one token late"),
    (one_route_for_all_sampled_tokens, 1.0, {}, 1, "no better than chance"),
    (one_route_for_all_sampled_tokens, 1.0, FEW, 5, "sampled tokens are those of other tokens"),
    (every_second_token_foreign, 0, {}, 5, "in some rows"),
    (half_the_layers_of_two, 0, {}, 8, "in some layers"),
]


@pytest.mark.parametrize(("plant", "share", "routers", "steps", "says"), FAULTS)
def test_a_fault_confined_to_some_rows_is_refused_within_a_few_steps(plant, share, routers, steps, says):
    history, verdicts = EvidenceHistory(), []
    for step in range(steps):
        native, replayed = siblings(step, **routers)
        assert measure(native, replayed, step).sequences[1] == 0
        verdicts.append(judge(measure(native, plant(replayed, share, np.random.default_rng(step)), step), history))
        if verdicts[-1].status == "misaligned":
            break
    assert verdicts[-1].status == "misaligned", history.log10
    assert says in verdicts[-1].detail
    with pytest.raises(mr.AlignmentError):
        verdicts[-1].raise_if_misaligned()


def test_evidence_of_several_steps_refuses_what_one_step_cannot():
    history, alone = EvidenceHistory(), []
    for step in range(8):
        native, replayed = siblings(step, **FEW)
        table = measure(native, completions_of_siblings(replayed, 0.1, np.random.default_rng(step)), step)
        alone.append(judge(table).status)
        verdict = judge(table, history)
        if verdict.status == "misaligned":
            break
    assert alone == ["aligned"] * len(alone)
    assert len(alone) > 1
    assert (verdict.status, verdict.cause) == ("misaligned", Cause.OTHER_SAMPLE)
    assert f"over {len(alone)} steps" in verdict.detail


def test_a_fault_that_begins_late_is_refused_as_fast_as_one_from_the_beginning():
    tables = [measure(*siblings(step), step) for step in range(3)]
    native, replayed = siblings(9, **CLOSE)
    wrong = measure(native, late_completions(replayed, 0.5, np.random.default_rng(0)), 9)
    fresh, old = EvidenceHistory(), EvidenceHistory()
    for table in tables * 50:
        assert judge(table, old).aligned
    assert (judge(wrong, fresh).status, judge(wrong, old).status) == ("misaligned", "misaligned")
    assert old.log10 == pytest.approx(fresh.log10, abs=0.5)
    assert old.steps <= 2  # the steps that the evidence is from


VERIFIED = [  # fault, share, routers, cause
    (completions_of_siblings, 0.1, {}, Cause.OTHER_SAMPLE),
    (rows_of_siblings, 0.5, {}, Cause.OTHER_SAMPLE),
    (rows_of_siblings, 0.2, {}, Cause.OTHER_SAMPLE),
    (late_completions, 0.2, CLOSE, Cause.TOKEN_SHIFT),
    (late_completions, 0.5, FEW, Cause.TOKEN_SHIFT),
    (late_by_a_period, 1.0, {"period": 6}, Cause.TOKEN_SHIFT),
    (every_second_token_foreign, 0, {}, Cause.OTHER_TOKENS),
    (half_the_layers_of_two, 0, {}, Cause.OTHER_TOKENS),
]


@pytest.mark.parametrize(("plant", "share", "routers", "cause"), VERIFIED)
def test_the_whole_comparison_finds_them_too(plant, share, routers, cause):
    native, replayed = siblings(0, **routers)
    assert compare(native, replayed).aligned
    verdict = compare(native, plant(replayed, share, np.random.default_rng(0))).verdict
    assert (verdict.status, verdict.cause) == ("misaligned", cause)


def test_layers_and_samples_of_a_partial_fault_are_named():
    native, replayed = siblings(0)
    verdict = compare(native, half_the_layers_of_two(replayed, 0, np.random.default_rng(0))).verdict
    assert (verdict.layers, verdict.samples) == ((1, 3, 5, 7), (1, 4))


@pytest.fixture(scope="module")
def policy():
    """A model of three MoE layers, top 2 of 8, as the rollout (float32) and as the trainer (bfloat16)."""
    model = tiny_qwen3_moe()
    return model, copy.deepcopy(model).to(torch.bfloat16)


def one_pass(policy, plant, step: int, period: int = 0):
    """(native, given, layout) of one micro-batch of 8 siblings under replay of what `plant` makes of their routes."""
    chance = np.random.default_rng(step)
    prompt = chance.integers(1, 97, PROMPT_TOKENS)
    tails = [np.resize(chance.integers(1, 97, period or 40), 40) for _ in range(8)]
    ids = [np.concatenate([prompt, tail]) for tail in tails]
    layout = mr.TokenLayout.padded([70] * 8)
    fed = torch.from_numpy(layout.fed_token_ids(ids)).long()
    rollout, trainer = map(mr.attach, policy)
    with torch.no_grad(), rollout.record() as recording:
        policy[0](input_ids=fed)
    traces = [
        with_routes(t, t.routed_experts, np.arange(70) < 69)
        for t in recording.traces(layout, [i.tolist() for i in ids])
    ]
    replayed = mr.RouteBatch.from_traces(plant(traces, chance), layout)
    with torch.no_grad(), trainer.replay(replayed, observe=True) as replaying:
        policy[1](input_ids=fed)
    rollout.detach()
    trainer.detach()
    return replaying.native(), replayed, layout


REPLAYED = [  # fault, period of completions, refused within so many steps
    (lambda traces, chance: completions_of_siblings(traces, 0.5, chance), 0, 1),
    (lambda traces, chance: late_completions(traces, 0.2, chance), 0, 4),
    (lambda traces, chance: late_by_a_period(traces, 1.0, chance), 6, 4),
    (lambda traces, chance: late_by_two(traces, 1.0, chance), 2, 6),
    (lambda traces, chance: late_completions(traces, 1.0, chance), 1, 8),
    (one_route_for_all_sampled_tokens, 0, 4),
]
REPLAYED_NAMES = ["siblings", "late", "one period late", "a period of two, two late", "one token repeated", "one route"]


@pytest.mark.parametrize(("plant", "period", "steps"), REPLAYED, ids=REPLAYED_NAMES)
def test_faults_in_what_a_model_replays_are_refused(policy, plant, period, steps):
    watch, healthy_run, history = AlignmentWatch(), EvidenceHistory(), EvidenceHistory()
    for step in range(steps):
        native, replayed, layout = one_pass(policy, lambda traces, _: traces, step, period)
        assert judge(watch.measure(native, replayed, layout, step, sampled_tokens(layout)), healthy_run).aligned
        native, replayed, layout = one_pass(policy, plant, step, period)
        verdict = judge(watch.measure(native, replayed, layout, step, sampled_tokens(layout)), history)
        if verdict.status == "misaligned":
            break
    assert verdict.status == "misaligned", history.log10
    assert healthy_run.log10 < 0.1


# ---- no alarm without a fault ----------------------------------------------------------------------------------------


def harmless(seed: int):
    """Sizes at random, and what may look like a fault: repeated text, low agreement, one expert for almost all."""
    chance = np.random.default_rng([3, seed])
    num_experts = int(chance.choice([8, 16, 64, 128]))
    made = Routers(
        seed,
        layers=int(chance.choice([1, 2, 4, 8])),
        num_experts=num_experts,
        top_k=min(int(chance.choice([1, 2, 4, 8])), num_experts // 2),
        skew=float(chance.choice([0, 0.5, 2, 5])),
    )
    alike, length = float(chance.choice([0, 0.5, 0.9, 0.99])), int(chance.choice([6, 20, 60]))
    (shared,) = made.tokens([int(chance.choice([4, PROMPT_TOKENS]))], alike)
    tails = made.tokens([length] * int(chance.choice([1, 2, 8])), alike)
    if seed % 4 == 1:  # few words
        words = made.tokens([int(chance.choice([2, 5]))], 0)[0]
        tails = [words[chance.integers(0, len(words), length)] for _ in tails]
    if seed % 4 == 2:  # periodic
        period, drift = int(chance.choice([1, 2, 3, 7])), float(chance.choice([0, 0.02, 0.1]))
        tails = [np.resize(t[:period], t.shape) + drift * made.chance.normal(size=t.shape) for t in tails]
    sequences = [np.concatenate([shared, tail]) for tail in tails]
    native = made.route(sequences, float(chance.choice([0, 0.05, 0.15])))
    noise = float(chance.choice([0.05, 0.15, 0.3, 0.45]))
    if seed % 4 == 3:  # another router: it errs in the same way wherever a text is repeated
        made.weights = made.weights + noise * made.chance.normal(size=made.weights.shape)
        noise = 0.0
    return native, made.route(sequences, noise, last=False)


def test_wealth_does_not_grow_on_healthy_routes():
    """Each unit's wealth has an expectation of at most 1, for every kind of bet; then so has every product of them."""
    history, log_wealths = EvidenceHistory(), []
    for seed in range(120):
        ours, theirs, layout = batches(*harmless(seed))
        sampled = sampled_tokens(layout) if seed % 3 else None
        sample = RowSample.draw(layout, np.random.default_rng(seed), sequences=8, rows=128, sampled=sampled)
        evidence = unit_evidence(ours, theirs, sample, ours.num_experts or 0)
        log_wealths.append(evidence.log_wealth[..., evidence.counted].flatten(0, 2))
        sums = evidence.summed(torch.from_numpy(sample.segments))
        history.add(sums.log_wealth.numpy(), sums.unit_counts.numpy())
        assert history.log10 < 1  # an alarm is 10
    wealth = torch.cat(log_wealths, 1).exp()
    assert wealth.shape[1] > 500
    assert wealth.mean(1).max() <= 1


def test_the_false_alarm_rate_is_that_of_a_bet_whose_expectation_is_one():
    """Fair bets at the limit of the hypothesis: of N steps, at most a fraction N / c of the runs reaches c."""
    chance, steps, runs, limit = np.random.default_rng(0), 40, 150, 60.0
    reached = 0
    for _ in range(runs):
        history = EvidenceHistory()
        for _ in range(steps):
            fair = np.where(chance.random() < 0.5, 1.5, 0.5)  # the same for all bets: nothing is averaged out
            history.add(np.full(WEALTH_SHAPE, np.log(fair)), np.zeros(COUNTS_SHAPE))
            if history.log10 >= np.log10(limit):
                reached += 1
                break
    assert 0 < reached / runs <= steps / limit


def test_an_alarm_needs_evidence_of_one_over_the_stated_rate():
    assert FALSE_ALARMS == 1e-10  # docs/verify.md states it
    history = EvidenceHistory()
    history.add(np.full(WEALTH_SHAPE, np.log(0.99 / FALSE_ALARMS)), np.zeros(COUNTS_SHAPE))
    assert not history.alarming
    history.add(np.full(WEALTH_SHAPE, np.log(1.02)), np.zeros(COUNTS_SHAPE))
    assert history.alarming


# ---- what is compared ------------------------------------------------------------------------------------------------


def test_a_vote_is_on_the_experts_that_tell_two_places_apart():
    """One sequence of 3 tokens, top 2: token 1 has the routes of token 0, except that both share expert 0."""
    native = [mr.RouteTrace([1, 2, 3], [[[0, 1]], [[0, 2]], [[4, 5]]], [0], num_experts=8)]
    replayed = [mr.RouteTrace([1, 2, 3], [[[0, 1]], [[0, 1]], [[4, 5]]], [0], num_experts=8)]
    ours, theirs, _ = batches(native, replayed)
    alternatives = np.full((NUM_ALTERNATIVES, 1, 1), -1)
    alternatives[0, 0, 0] = 0  # one token late
    rows, nothing = np.array([[1]]), np.full((4, 1, 1), -1)
    sample = RowSample(rows, np.array([0]), np.array([UNKNOWN]), alternatives, nothing)
    evidence = unit_evidence(ours, theirs, sample, 8)
    all_rows = evidence.log_wealth[0, :, :, 0].exp()
    assert SHIFTS[0] == 1
    assert all_rows[:, 0].tolist() == pytest.approx([1 + 0.3 * 0.95, 1 + 0.9 * 0.95])  # a vote of 1, above 0.05
    assert all_rows[:, 1:].flatten().tolist() == pytest.approx([1.0] * (2 * NUM_ALTERNATIVES))
    assert not unit_evidence(
        ours, theirs, replace(sample, alternatives=np.full_like(alternatives, -1)), 8
    ).counted.any()


def test_a_question_that_is_asked_many_times_counts_once():
    """Repeated text: the same two sets of experts, and the same answer."""
    native = [mr.RouteTrace(range(40), [[[0]], [[1]]] * 20, [0], num_experts=8)]
    replayed = [mr.RouteTrace(range(40), [[[1]], [[0]]] * 20, [0], num_experts=8)]  # one token late, or two near-ties
    ours, theirs, layout = batches(native, replayed)
    sample = RowSample.draw(layout, np.random.default_rng(0), sequences=1, rows=32)
    wealth = unit_evidence(ours, theirs, sample, 8).log_wealth[0, :, 0].exp()
    assert wealth.max() < 2 * (1 + 0.9) ** 2


def test_the_same_prompt_in_two_sequences_is_not_compared():
    """Its native routes differ by numerical noise alone, which may side with one sequence in every step of a run."""
    ours, theirs, layout = batches(*siblings(0, own_noise=0.03))
    sample = RowSample.draw(layout, np.random.default_rng(0), sequences=8, rows=128, sampled=sampled_tokens(layout))
    routes, prompts = ours.routed_experts.view(8, 8, -1, 4), sample.segment == PROMPT
    assert not torch.equal(routes[:, 0, :PROMPT_TOKENS], routes[:, 1, :PROMPT_TOKENS])
    log_wealth = unit_evidence(ours, theirs, sample, 32).log_wealth[:, :, len(SHIFTS) : NUM_ALTERNATIVES]
    assert not log_wealth[..., prompts].any()
    assert log_wealth[..., ~prompts].any()


def test_rows_are_drawn_from_prompts_and_sampled_tokens_apart():
    native, replayed = siblings(0)
    layout = batches(native, replayed)[2]
    sampled = sampled_tokens(layout)
    sample = RowSample.draw(layout, np.random.default_rng(0), sequences=5, rows=60, sampled=sampled)
    assert sorted(sample.segment.tolist()) == [PROMPT] * 5 + [SAMPLED] * 5
    for rows, sequence, segment in zip(sample.rows, sample.sequence, sample.segment, strict=True):
        tokens = layout.rows[rows[rows >= 0]]
        assert len(tokens) == len(set(tokens.tolist())) == (8 if segment == SAMPLED else 4)
        assert {layout.locate(int(token))[0] for token in tokens} == {sequence}
        assert set(sampled[tokens].tolist()) == {segment == SAMPLED}
    short = RowSample.draw(layout, np.random.default_rng(0), sequences=1, rows=60, sampled=sampled)
    assert short.present.sum(1).tolist() == [20, 40]


def test_rows_are_compared_with_tokens_of_their_sequence_and_of_others():
    layout = mr.TokenLayout.packed([9, 7, 8], pad_each_to_multiple_of=4).sequence_major()
    sample = RowSample.draw(layout, np.random.default_rng(0), sequences=3, rows=30)
    found = set()
    for (unit, column), alternative in itertools.product(np.argwhere(sample.present), range(NUM_ALTERNATIVES)):
        sequence, position = layout.locate(int(layout.rows[sample.rows[unit, column]]))
        other = sample.alternatives[alternative, unit, column]
        if other >= 0:
            origin = layout.locate(int(layout.rows[other]))
            expected = position - SHIFTS[alternative] if alternative < len(SHIFTS) else position
            assert origin[1] == expected
            assert (origin[0] == sequence) == (alternative < len(SHIFTS))
            found.add((sequence, origin[0]))
    assert found == set(itertools.product(range(3), range(3)))


def test_without_knowing_what_was_sampled_halves_are_tested_apart():
    native, replayed = siblings(0)
    ours, theirs, layout = batches(native, late_completions(replayed, 1.0, np.random.default_rng(0)))
    assert judge(AlignmentWatch().measure(ours, theirs, layout, 0)).status == "misaligned"
    with pytest.raises(mr.AlignmentError, match=r"whether it was sampled.*bool \(560,\)"):
        AlignmentWatch().measure(ours, theirs, layout, 0, np.ones(3, bool))


def test_evidence_of_ranks_and_micro_batches_adds_up():
    tables = [measure(*siblings(seed), 0) for seed in (1, 2)]
    total = tables[0] + tables[1]
    torch.testing.assert_close(total.log_wealth, tables[0].log_wealth + tables[1].log_wealth)
    assert total.unit_counts.sum() == sum(table.unit_counts.sum() for table in tables) > 0
    again = total.with_vector(total.vector())
    torch.testing.assert_close(again.log_wealth, total.log_wealth)


def test_rows_without_routes_give_no_evidence():
    native, replayed = healthy(0, (40, 30))
    bare = [with_routes(t, t.routed_experts, np.zeros(len(t), bool)) for t in replayed]
    ours, theirs, layout = batches(native, bare)
    table = AlignmentWatch().measure(ours, theirs, layout, 0)
    assert table.unit_counts.sum() == 0
    assert not table.log_wealth.any()


# ---- the check of a step ---------------------------------------------------------------------------------------------


def checked(check: mr.AlignmentCheck, native, replayed, step: int):
    ours, theirs, layout = batches(native, replayed)
    check.add(ours, theirs, layout, step, sampled_tokens(layout))
    return check.check()


def topology_of(native) -> mr.MoeTopology:
    layers = tuple(MoeLayer(layer, 8, 2) for layer in native[0].layers)
    return mr.MoeTopology(max(native[0].layers) + 1, layers)


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_a_check_stops_the_run_or_warns_and_starts_again(action, caplog):
    native, replayed = siblings(0, layers=3, num_experts=8, top_k=2)
    late = [moved(trace, np.arange(len(trace)) - 1) for trace in replayed]
    check = mr.AlignmentCheck(topology_of(native), torch.device("cpu"), on_misalignment=action)
    assert checked(check, native, replayed, 0).aligned
    if action == "stop":
        with pytest.raises(mr.AlignmentError, match="one token late"):
            checked(check, native, late, 1)
        return
    assert checked(check, native, late, 1).status == "misaligned"
    assert "one token late" in caplog.text
    assert check.evidence == 0
    assert checked(check, native, replayed, 2).aligned
