"""Micro-batches by the load of expert-parallel ranks: nothing lost, no budget exceeded, never worse than by tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moe_replay as mr
from moe_replay.records import MicroBatch, Trajectory
from moe_replay.routes.layout import Prefix
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.train.backends.base import ExpertExchange
from moe_replay.train.learn import balance
from moe_replay.train.learn.balance import (
    LOAD,
    LOAD_BY_TOKENS,
    LOAD_LIMIT,
    Division,
    ExpertBalance,
    Units,
    balanced_division,
    best_possible,
    expert_rows,
    layer_ratios,
    loads_of,
    spread_evenly,
)
from moe_replay.train.learn.batches import divide, mini_batches
from moe_replay.train.learn.sharing import Sharing
from tests.train.trajectories import LAYERS, NUM_EXPERTS, TOP_K, random_trajectory, stored

EP = 4


def random_units(seed: int, lengths: Sequence[int], ranks: int = EP, layers: int = 3) -> Units:
    """Sequences whose tokens go to different experts."""
    random = np.random.default_rng(seed)
    preferred = random.dirichlet(np.full(ranks, 0.5), (len(lengths), layers))
    tokens = np.array(lengths, np.int64)
    return Units(tokens, random.poisson(preferred * tokens[:, None, None] * TOP_K).astype(np.float32))


def fed(division: Division, tokens: np.ndarray, *, packed: bool) -> list[list[int]]:
    return [
        [int(tokens[bin_].sum() if packed else tokens[bin_].max() * len(bin_)) if bin_ else 0 for bin_ in share]
        for share in division
    ]


def widest(division: Division, units: Units, width: int, *, packed: bool) -> int:
    """Tokens of the fullest data rank of each exchange, over all micro-batches."""
    by_rank = fed(division, units.tokens, packed=packed)
    return sum(
        max(costs)
        for first in range(0, len(by_rank), width)
        for costs in itertools.zip_longest(*by_rank[first : first + width], fillvalue=0)
    )


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    exchanges=st.integers(1, 3),
    width=st.integers(1, 3),
    budget=st.integers(20, 100),
    packed=st.booleans(),
    seed=st.integers(0, 10),
)
def test_a_balanced_division_is_never_worse_and_keeps_every_budget(
    lengths: list[int], exchanges: int, width: int, budget: int, packed: bool, seed: int
) -> None:
    units = random_units(seed, lengths)
    by_tokens = divide(lengths, exchanges * width, budget, packed=packed)
    found = balanced_division(by_tokens, units, width, budget, packed=packed)
    assert sorted(i for share in found for bin_ in share for i in bin_) == list(range(len(lengths)))
    assert len(found) == len(by_tokens)
    assert max(map(len, found)) == max(map(len, by_tokens))
    before, after = loads_of(by_tokens, units, width), loads_of(found, units, width)
    assert after.busiest <= before.busiest
    assert after.mean == pytest.approx(before.mean)
    assert after.busiest >= best_possible(units).busiest * (1 - 1e-6)
    for share, costs in zip(found, fed(found, units.tokens, packed=packed), strict=True):
        assert all(cost <= budget or len(bin_) == 1 for bin_, cost in zip(share, costs, strict=True))
    # what is saved in experts is more than what the fullest ranks lose elsewhere
    lost = widest(found, units, width, packed=packed) - widest(by_tokens, units, width, packed=packed)
    token = units.rows.sum() / units.tokens.sum() * width / EP
    assert lost * token <= (before.busiest - after.busiest) * (1 + 1e-6)
    assert balanced_division(by_tokens, units, width, budget, packed=packed) == found


def test_sequences_of_the_same_experts_are_spread_over_micro_batches() -> None:
    """Eight sequences for the experts of each of four ranks, and two micro-batches on each of four data ranks."""
    tokens = np.full(32, 10, np.int64)
    rows = np.zeros((32, 1, EP), np.float32)
    rows[np.arange(32), 0, np.arange(32) // 8] = 20
    units = Units(tokens, rows)
    # the first micro-batch has sequences for the ranks 0 and 1, the second those for 2 and 3
    skewed: Division = [[list(range(4 * i, 4 * i + 4)) for i in (rank, rank + 4)] for rank in range(4)]
    assert loads_of(skewed, units, 4).ratio == 2
    found = balanced_division(skewed, units, 4, 40, packed=True)
    assert loads_of(found, units, 4).ratio == 1
    assert layer_ratios(found, units, 4).tolist() == [1]


@pytest.mark.parametrize("start", [0, 3])
def test_rows_are_counted_as_routers_send_them(start: int) -> None:
    trace = random_trajectory(0, prompt=4, completion=9).trace
    expected = np.zeros((len(LAYERS), EP), np.int64)
    for token in range(start, len(trace)):
        for layer in range(len(LAYERS)):
            for expert in trace.routed_experts[token, layer] if trace.valid[token, layer] else ():
                expected[layer, expert // (NUM_EXPERTS // EP)] += 1
    assert expert_rows(trace, EP, NUM_EXPERTS, start).tolist() == expected.tolist()


def test_tokens_without_routes_count_the_same_for_every_rank() -> None:
    found = spread_evenly(np.array([[[3, 1]], [[0, 0]]]), np.array([4, 5]), top_k=2)
    assert found.tolist() == [[[5.0, 3.0]], [[5.0, 5.0]]]


# ---- micro-batches ---------------------------------------------------------------------------------------------------


class OneRank:
    """What the division needs of a backend: one data rank, of which tokens travel to the experts of four."""

    device = torch.device("cpu")
    chunk_layers = (LAYERS,)
    data_rank, data_size, micro_batch_multiple = 0, 1, 1
    expert_exchange = ExpertExchange(EP, 1, True)
    topology = MoeTopology(4, tuple(MoeLayer(i, num_experts=NUM_EXPERTS, top_k=TOP_K) for i in LAYERS))

    def layout(self, lengths: Sequence[int], prefixes: Sequence[Prefix] = ()) -> mr.TokenLayout:
        return mr.TokenLayout.shared(lengths, prefixes) if prefixes else mr.TokenLayout.packed(lengths)


def one_sided(row: int, completion: int, first: int, prompt: int = 3) -> Trajectory:
    """A trajectory whose tokens all go to two experts; two rows of one group have the same prompt."""
    trajectory = random_trajectory(row, prompt, completion)
    ids = trajectory.token_ids.copy()
    ids[:prompt] = trajectory.group + 1
    routes = np.broadcast_to(np.array([first, first + 1], np.uint8), (len(ids), len(LAYERS), TOP_K))
    trace = mr.RouteTrace(ids, routes, LAYERS, num_experts=NUM_EXPERTS)
    return replace(trajectory, token_ids=ids, trace=trace)


def made_of(
    trajectories: Sequence[Trajectory], budget: int, sharing: Sharing | None = None
) -> tuple[list[MicroBatch], dict[str, float]]:
    backend: OneRank = OneRank()
    balance = ExpertBalance(backend)  # type: ignore[arg-type]
    (batches,) = mini_batches(
        *stored(trajectories),
        backend,  # type: ignore[arg-type]
        updates=1,
        aggregation="token_mean",
        max_tokens=16,
        budget=budget,
        packed=True,
        sharing=sharing,
        balance=balance,
    )
    return batches, balance.metrics


def test_micro_batches_of_a_rank_have_all_experts() -> None:
    trajectories = [one_sided(row, 5, first=row // 4 * 2) for row in range(16)]
    batches, metrics = made_of(trajectories, budget=32)
    assert sorted(t.row for batch in batches for t in batch.trajectories) == list(range(16))
    for batch in batches:
        assert sorted(int(t.trace.routed_experts[0, 0, 0]) for t in batch.trajectories) == [0, 2, 4, 6]
    assert metrics == {LOAD: 1.0, LOAD_BY_TOKENS: 4.0, LOAD_LIMIT: 1.0}


def test_samples_that_share_a_prompt_stay_together() -> None:
    trajectories = [one_sided(row, 5, first=row // 4 * 2) for row in range(16)]
    batches, metrics = made_of(trajectories, budget=26, sharing=Sharing(same_routes=True))
    assert sorted(t.row for batch in batches for t in batch.trajectories) == list(range(16))
    for batch in batches:
        assert len(batch.trajectories) == 4
        assert batch.layout.num_shared == 6  # the prompts of two groups, once each
    assert metrics[LOAD] == 2 == metrics[LOAD_BY_TOKENS] / 2


def test_samples_without_routes_are_divided_by_tokens() -> None:
    trajectories = [random_trajectory(row, 3, 5 + row % 3) for row in range(12)]
    unrouted = [replace(t, trace=mr.RouteTrace.uncovered(t.token_ids, (0,), 1)) for t in trajectories]
    batches, metrics = made_of(unrouted, budget=32)
    assert sorted(t.row for batch in batches for t in batch.trajectories) == list(range(12))
    assert metrics == {LOAD: 1.0, LOAD_BY_TOKENS: 1.0, LOAD_LIMIT: 1.0}
    half = [
        *trajectories[:6],
        *(replace(t, trace=mr.RouteTrace.uncovered(t.token_ids, LAYERS, 2)) for t in trajectories[6:]),
    ]
    batches, metrics = made_of(half, budget=32)
    assert sorted(t.row for batch in batches for t in batch.trajectories) == list(range(12))
    assert 1 <= metrics[LOAD_LIMIT] <= metrics[LOAD] <= metrics[LOAD_BY_TOKENS]


def test_a_search_that_finds_something_worse_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((4, 1, 2), np.float32)
    rows[[0, 2], 0, 0] = rows[[1, 3], 0, 1] = 8  # two samples for each of two ranks
    units = Units(np.full(4, 4, np.int64), rows)
    mixed, worse = [[[0, 1], [2, 3]]], [[[0, 2], [1, 3]]]
    assert loads_of(worse, units, 1).busiest == 2 * loads_of(mixed, units, 1).busiest
    monkeypatch.setattr(balance._Search, "division", lambda search: worse)
    assert balanced_division(mixed, units, 1, 8, packed=True) is mixed
    assert balanced_division(worse, units, 1, 8, packed=True) == worse
    monkeypatch.setattr(balance._Search, "division", lambda search: mixed)
    assert balanced_division(worse, units, 1, 8, packed=True) is mixed
