"""The sums of the watch, made by few operations: what the shift test and paired comparisons give one by one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe_replay as mr
from moe_replay.verification.agreement import _shared_broadcast, _shared_by_column
from moe_replay.verification.alignment_verdict import CERTAIN, FLOOR, judge
from moe_replay.verification.sequential import (
    AFFECTED,
    AHEAD,
    BEHIND,
    DISTINCT,
    NUM_ALTERNATIVES,
    SHIFTS,
    SOME,
    STAKES,
    AlternativeKind,
    EvidenceHistory,
    RowSample,
    UnitEvidence,
    unit_evidence,
)
from moe_replay.verification.shift import HERE, ShiftTable, shift_table
from moe_replay.verification.watch import AlignmentWatch
from moe_replay.verification.wrong_rows import MIN_INFORMATION
from tests.verification.routes import siblings, with_routes

LAYERS, STAGE = tuple(range(0, 12, 2)), (2, 4, 6, 8)
NUM_EXPERTS, TOP_K = 6, 2


def batches(seed: int, layout: mr.TokenLayout, holes: bool) -> tuple[mr.RouteBatch, mr.RouteBatch]:
    """Routes of one pipeline stage at random; neighbours resemble each other, and some rows name one expert twice."""
    chance = np.random.default_rng(seed)
    scores = chance.normal(size=(len(STAGE), layout.num_tokens, NUM_EXPERTS))
    scores[:, 1:] += scores[:, :-1]
    scores = scores[:, np.maximum(layout.rows, 0)]
    native, replayed = (
        np.argsort(-(scores + noise * chance.normal(size=scores.shape)), -1)[..., :TOP_K] for noise in (0, 0.7)
    )
    replayed[:, chance.random(layout.num_rows) < 0.1] = 0
    held = np.broadcast_to(layout.rows >= 0, native.shape[:2])
    covered = [held & (chance.random(held.shape) < share) if holes else held for share in (0.95, 0.8)]

    def batch(experts: np.ndarray, valid: np.ndarray) -> mr.RouteBatch:
        return mr.RouteBatch(
            layers=STAGE,
            routed_experts=torch.from_numpy(experts.astype(np.uint8)),
            valid=torch.from_numpy(np.ascontiguousarray(valid)),
            all_valid=tuple(valid.all(1).tolist()),
            source_layers=LAYERS,
            num_experts=NUM_EXPERTS,
        )

    return batch(native, covered[0] if holes else np.ones_like(held)), batch(replayed, covered[1])


LAYOUTS = {
    "padded": mr.TokenLayout.padded([13, 1, 9, 30]),
    "packed": mr.TokenLayout.packed([40, 8]),
    "sequence-major": mr.TokenLayout.padded([12, 16]).sequence_major(),
    "context parallel": mr.TokenLayout.packed([24, 8, 12], pad_each_to_multiple_of=4).context_parallel(1, 2),
}


@pytest.mark.parametrize("holes", [False, True], ids=["covered", "with holes"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_the_table_of_the_watch_is_that_of_the_rows_and_layers_it_has_drawn(layout, holes):
    native, replayed = batches(layout.num_rows, layout, holes)
    watch, step = AlignmentWatch(layers=3, sequences=2, tokens=9), 5
    sampled = np.arange(layout.num_tokens) % 3 > 0
    table = watch.measure(native, replayed, layout, step, sampled)

    chance = np.random.default_rng([watch.seed, step])
    layers = tuple(sorted(chance.choice(STAGE, 3, replace=False).tolist()))
    sample = RowSample.draw(layout, chance, sequences=2, rows=18, sampled=sampled)
    rows = sample.rows[sample.present]
    whole = only_layers(shift_table(native, replayed, layout, rows=rows), layers)
    assert whole.pairs[:, HERE, HERE, 0].sum() > 20
    torch.testing.assert_close(table.loads, whole.loads)
    torch.testing.assert_close(table.pairs, whole.pairs)
    torch.testing.assert_close(table.next_token_overlap, whole.next_token_overlap)

    ours, theirs = native.select_layers(layers), replayed.select_layers(layers)
    expected = unit_evidence(ours, theirs, sample, NUM_EXPERTS).summed(torch.from_numpy(sample.segments))
    torch.testing.assert_close(table.log_wealth, expected.log_wealth)
    torch.testing.assert_close(table.unit_counts, expected.unit_counts)
    assert table.sequences.tolist() == lost_sequences(ours, theirs, sample, whole.chance[np.isin(LAYERS, layers), HERE])


def only_layers(table: ShiftTable, layers: tuple[int, ...]) -> ShiftTable:
    """The sums of these layers; replayed loads also of layers of the stage that are at most two away."""
    drawn = torch.from_numpy(np.isin(table.layers, layers))
    slots = [STAGE.index(layer) for layer in layers]
    reach = [layer for slot, layer in enumerate(STAGE) if any(abs(slot - drawn_slot) <= 2 for drawn_slot in slots)]
    near = torch.from_numpy(np.isin(table.layers, reach))
    loads = torch.stack([table.loads[:, 0] * drawn[:, None], table.loads[:, 1] * near[:, None]], 1)
    return replace(
        table,
        pairs=table.pairs * drawn[:, None, None, None],
        loads=loads,
        next_token_overlap=table.next_token_overlap * drawn[:, None],
    )


def lost_sequences(
    native: mr.RouteBatch, replayed: mr.RouteBatch, sample: RowSample, chance: np.ndarray
) -> list[float]:
    """Sequences that can be judged by their prompt or by what was sampled, and those that are lost."""
    judged, lost = set(), set()
    for rows, sequence in zip(sample.rows, sample.sequence.tolist(), strict=True):
        gained, possible = [], []
        for row in rows[rows >= 0].tolist():
            useful = [s for s, c in enumerate(chance) if 1 - c > MIN_INFORMATION and replayed.valid[s, row]]
            if useful:
                ours, theirs = (
                    [set(batch.routed_experts[s, row].tolist()) for s in useful] for batch in (native, replayed)
                )
                shares = [len(a & b) / native.top_k for a, b in zip(ours, theirs, strict=True)]
                gained.append(sum(shares) - sum(chance[useful]))
                possible.append(sum(1 - chance[useful]))
        if len(gained) < 4:
            continue
        level = sum(gained) / sum(possible)
        residual = sum((g - level * p) ** 2 for g, p in zip(gained, possible, strict=True))
        margin = CERTAIN * math.sqrt(residual + sum(possible) / (4 * native.top_k)) / sum(possible)
        if margin < FLOOR:
            judged.add(sequence)
            if level + margin < FLOOR:
                lost.add(sequence)
    return [len(judged), len(lost)]


def test_sequences_that_are_lost_are_counted():
    native, replayed = siblings(0)
    layout = mr.TokenLayout.padded([len(trace) for trace in native])
    spoilt = [*replayed[:6], *(with_routes(replayed[one], replayed[one - 5].routed_experts) for one in (6, 7))]
    ours, theirs = (mr.RouteBatch.from_traces(traces, layout) for traces in (native, spoilt))
    sampled = np.tile(np.arange(70) >= 30, 8)
    watch, step = AlignmentWatch(tokens=48), 2
    table = watch.measure(ours, theirs, layout, step, sampled)
    chance = np.random.default_rng([watch.seed, step])
    chance.choice(ours.layers, 8, replace=False)
    sample = RowSample.draw(layout, chance, sequences=8, rows=8 * 48, sampled=sampled)
    whole = shift_table(ours, theirs, layout, rows=sample.rows[sample.present])
    assert table.sequences.tolist() == lost_sequences(ours, theirs, sample, whole.chance[:, HERE]) == [8, 2]


# ---- paired comparisons, one by one ----------------------------------------------------------------------------------


def mixed(log_wealth: float, share: float) -> float:
    return math.log(1 - share + share * math.exp(log_wealth))


def wealth_by_hand(native: mr.RouteBatch, replayed: mr.RouteBatch, sample: RowSample) -> np.ndarray:
    """(kinds, stakes, H, U): every vote as docs/verify.md describes it."""
    layers, units = range(len(native.layers)), range(len(sample.rows))

    def experts(batch: mr.RouteBatch, layer: int, row: int) -> set[int]:
        return set(batch.routed_experts[layer, row].tolist())

    def votes(row: int, other: int, shifted: bool) -> dict[int, tuple[float, float, set[int]]]:
        """Layer -> vote, weight, experts of the other alternative."""
        if min(row, other) < 0:
            return {}
        both = replayed.valid[:, row] & native.valid[:, row] & native.valid[:, other]
        alternatives = {
            layer: (experts(native, layer, row), experts(native, layer, other)) for layer in layers if both[layer]
        }
        differing = {layer: TOP_K - len(own & there) for layer, (own, there) in alternatives.items()}
        weight = min(1.0, sum(differing.values()) / (DISTINCT * TOP_K * max(len(alternatives), 1)))
        weight = weight if shifted else float(weight >= 1)
        return {
            layer: (
                (len(there & experts(replayed, layer, row)) - len(own & experts(replayed, layer, row)))
                / differing[layer],
                weight,
                there,
            )
            for layer, (own, there) in alternatives.items()
            if differing[layer] and weight
        }

    result = np.empty((1 + 2 * len(SOME), len(STAKES), NUM_ALTERNATIVES + 1, len(units)))
    for unit, alternative in itertools.product(units, range(NUM_ALTERNATIVES + 1)):
        ahead, weights, questions = {}, {}, {}
        for column, row in enumerate(sample.rows[unit].tolist()):
            own = [tuple(sorted(experts(native, layer, row))) for layer in layers]
            if alternative < NUM_ALTERNATIVES:
                found = votes(row, int(sample.alternatives[alternative, unit, column]), alternative < len(SHIFTS))
                for layer, (vote, weight, there) in found.items():
                    cell = layer, column
                    ahead[cell], weights[cell] = vote - AHEAD, weight
                    questions[cell] = (layer, own[layer], tuple(sorted(there)))
                continue
            drawn = [votes(row, int(other), shifted=False) for other in sample.controls[:, unit, column]]
            for layer in layers:
                seen = [one[layer][0] for one in drawn if layer in one]
                if seen:
                    cell = layer, column
                    ahead[cell], weights[cell] = sum(seen) / len(seen) + BEHIND, 1.0
                    questions[cell] = (layer, own[layer])
        asked = Counter(questions.values())
        for number, stake in enumerate(STAKES):
            gain = np.zeros((len(layers), sample.rows.shape[1]))
            for cell in ahead:
                bet = math.log1p(stake[alternative == NUM_ALTERNATIVES] * ahead[cell])
                gain[cell] = bet * weights[cell] / asked[questions[cell]]
            parts = [[sum(mixed(one, share) for one in gain.sum(axis)) for share in SOME] for axis in (0, 1)]
            result[:, number, alternative, unit] = [gain.sum(), *parts[0], *parts[1]]
    return result


@pytest.mark.parametrize(("name", "holes"), [("padded", True), ("context parallel", False)])
def test_wealth_is_what_betting_vote_by_vote_gives(name, holes):
    layout = LAYOUTS[name]
    native, replayed = batches(3, layout, holes)
    sample = RowSample.draw(layout, np.random.default_rng(1), sequences=2, rows=24)
    evidence = unit_evidence(native, replayed, sample, NUM_EXPERTS)
    expected = wealth_by_hand(native, replayed, sample)
    assert np.count_nonzero(expected) > 200
    np.testing.assert_allclose(evidence.log_wealth.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert evidence.counted.tolist() == expected.any((0, 1, 2)).tolist()


def test_wealth_of_units_is_pooled_and_suspects_are_tallied():
    log_wealth = torch.from_numpy(np.random.default_rng(0).normal(-3, 2, (5, 2, NUM_ALTERNATIVES + 1, 4)))
    log_wealth[..., 0] = -900.0
    log_wealth[2, 1, -1, 1], log_wealth[0, 0, 2, 2] = 200.0, 25.0
    segments = torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.float64)
    found = UnitEvidence(log_wealth, torch.tensor([True, True, True, False])).summed(segments)
    assert found.suspects.tolist() == [False, True, True, False]
    assert found.unit_counts.tolist() == [[1, 0, 0, 0], [2, 1, 0, 1], [0, 0, 0, 0]]
    assert (AlternativeKind.SHIFTED, AlternativeKind.FOREIGN) == (0, 2)
    for segment, (number, share) in itertools.product(range(2), enumerate(AFFECTED)):
        units = log_wealth[2, 1, -1][segments[segment] > 0].tolist()
        assert found.log_wealth[segment, number, 2, 1, -1].item() == pytest.approx(
            sum(mixed(one, share) for one in units)
        )
    assert not found.log_wealth[2].any()


# ---- how it is computed ----------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts operations, views left out."""

    VIEWS = (
        *("view", "expand", "slice", "select", "unsqueeze", "squeeze", "permute", "transpose", "t", "split", "alias"),
        *("split_with_sizes", "as_strided", "detach", "_unsafe_view", "unflatten"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.found[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))

    def count(self) -> int:
        return sum(count for name, count in self.found.items() if name not in self.VIEWS)


def test_a_step_is_watched_with_few_operations_on_the_device_and_judged_without_any():
    native, replayed = siblings(0)
    layout = mr.TokenLayout.padded([len(trace) for trace in native])
    ours, theirs = (mr.RouteBatch.from_traces(traces, layout) for traces in (native, replayed))
    with Operations() as measuring:
        table = AlignmentWatch().measure(ours, theirs, layout, 0)
    assert measuring.count() < 200  # what they cost on a GPU is to start them
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"} & set(measuring.found)
    sums = table.vector()
    with Operations() as judging:
        assert judge(table.with_vector(sums), EvidenceHistory()).aligned
    assert judging.count() == 0


def test_experts_are_found_alike_one_by_one_and_at_once():
    chance = torch.Generator().manual_seed(0)
    one, other = (torch.randint(0, 9, (5, 40, 4), generator=chance, dtype=torch.uint8) for _ in range(2))
    assert torch.equal(_shared_by_column(one, other), _shared_broadcast(one, other))
