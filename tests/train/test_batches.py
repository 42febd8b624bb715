"""Sequences divided over updates, ranks and micro-batches, and laid out: nothing lost, nothing counted twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moe_replay as mr
from moe_replay.train.backends.base import keep_rollout_routes
from moe_replay.train.learn.batches import divide, make_micro_batch, mini_batches
from moe_replay.train.learn.losses import token_weights
from tests.train.trajectories import LAYERS, random_trajectory, stored

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


class Rank:
    """What the division asks of a backend."""

    device = torch.device("cpu")
    chunk_layers = (LAYERS,)

    def __init__(self, rank: int = 0, size: int = 1, packed: bool = True, multiple: int = 1) -> None:
        self.data_rank, self.data_size, self.micro_batch_multiple = rank, size, multiple
        self._packed = packed

    def layout(self, lengths: Sequence[int]) -> mr.TokenLayout:
        return mr.TokenLayout.packed(lengths) if self._packed else mr.TokenLayout.padded(lengths)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), budget=st.integers(1, 100), packed=st.booleans())
def test_every_sequence_is_in_one_micro_batch_within_the_budget(
    lengths: list[int], ranks: int, budget: int, packed: bool
) -> None:
    division = divide(lengths, ranks, budget, packed=packed)
    assert len(division) == ranks
    assert sorted(i for share in division for bin_ in share for i in bin_) == list(range(len(lengths)))
    for bin_ in (bin_ for share in division for bin_ in share):
        held = [lengths[i] for i in bin_]
        cost = sum(held) if packed else max(held) * len(held)
        assert cost <= budget or len(bin_) == 1
    loads = [sum(lengths[i] for bin_ in share for i in bin_) for share in division]
    assert max(loads) - min(loads) <= max(lengths)


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_scores_the_sampled_tokens_and_no_others(packed: bool) -> None:
    trajectories = [random_trajectory(i, prompt=3, completion=4 + i, observed=2 * (i % 2)) for i in range(3)]
    rank = Rank(packed=packed)
    batch = make_micro_batch(trajectories, [0.5, 0.25, 0.125], rank.layout([len(t) for t in trajectories]), rank.device)

    flat = batch.input_ids.flatten()
    expected = [(i, p) for i, t in enumerate(trajectories) for p in range(1, len(t)) if t.sampled[p]]
    assert batch.sequence.tolist() == [i for i, _ in expected]
    assert batch.rollout_logprobs.tolist() == [float(trajectories[i].logprobs[p]) for i, p in expected]
    assert batch.loss_weights.tolist() == [[0.5, 0.25, 0.125][i] for i, _ in expected]
    # the place that predicts a token holds the token before it, and the target is the token itself
    order = batch.target_index.argsort()
    assert flat[batch.target_positions[order]].tolist() == [int(trajectories[i].token_ids[p - 1]) for i, p in expected]
    assert batch.target_ids[order].tolist() == [int(trajectories[i].token_ids[p]) for i, p in expected]
    positions = batch.position_ids.flatten()[batch.target_positions[order]]
    assert positions.tolist() == [p - 1 for _, p in expected]


def test_routes_of_the_rollout_belong_to_the_tokens_fed() -> None:
    trajectories = [random_trajectory(i, prompt=2, completion=5) for i in range(2)]
    rank = Rank()
    batch = make_micro_batch(trajectories, [1.0, 1.0], rank.layout([len(t) for t in trajectories]), rank.device)
    keep_rollout_routes(batch, rank.chunk_layers)
    (routes,) = batch.rollout_routes.values()
    routes.check_fed(batch.input_ids)
    assert routes.layers == LAYERS
    first = len(trajectories[0])
    assert np.array_equal(routes.routed_experts[1, first].numpy(), trajectories[1].trace.routed_experts[0, 1])


@given(
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=12),
    ranks=st.integers(1, 3),
    multiple=st.integers(1, 3),
    aggregation=st.sampled_from(["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"]),
)
def test_ranks_together_weigh_every_token_as_one_would(
    lengths: list[int], ranks: int, multiple: int, aggregation
) -> None:
    trajectories = [random_trajectory(i, prompt=2, completion=n) for i, n in enumerate(lengths)]
    updates = 2
    passes: list[list[int]] = []
    found: list[dict[int, float]] = [{} for _ in range(updates)]
    for rank in range(ranks):
        made = mini_batches(
            *stored(trajectories),
            Rank(rank, ranks, multiple=multiple),  # type: ignore[arg-type]
            updates=updates,
            aggregation=aggregation,
            max_tokens=9,
            budget=16,
            packed=True,
        )
        passes.append([len(batches) for batches in made])
        for update, batches in enumerate(made):
            for batch in batches:
                if batch.is_dummy:
                    assert not batch.loss_weights.any()
                    continue
                for i, trajectory in enumerate(batch.trajectories):
                    (weight,) = set(batch.loss_weights[batch.sequence == i].tolist())
                    assert trajectory.row not in found[update]
                    found[update][trajectory.row] = weight
    assert all(counts == passes[0] for counts in passes)
    assert all(count % multiple == 0 for count in passes[0])
    for part, weights in zip(np.array_split(np.arange(len(lengths)), updates), found, strict=True):
        expected = token_weights(np.array([lengths[i] for i in part]), aggregation, 9)
        assert sorted(weights) == part.tolist()
        np.testing.assert_allclose([weights[i] for i in part.tolist()], expected, rtol=1e-6)


def test_what_is_not_trained_on_counts_as_a_sequence_without_tokens() -> None:
    kept, unscored, cut = (random_trajectory(i, prompt=2, completion=4) for i in range(3))
    trajectories = [kept, replace(unscored, reward=float("nan")), cut.ended_by_length()]
    (batches,) = mini_batches(
        *stored(trajectories),
        Rank(),  # type: ignore[arg-type]
        updates=1,
        aggregation="seq_mean_token_mean",
        max_tokens=4,
        budget=100,
        packed=True,
        overlong_filter=True,
    )
    (batch,) = batches
    assert [t.row for t in batch.trajectories] == [0]
    np.testing.assert_allclose(batch.loss_weights.numpy(), 1 / (3 * 4))  # the mean is over three sequences


def test_an_update_without_anything_to_train_on_has_no_micro_batches() -> None:
    trajectories = [replace(random_trajectory(i, prompt=2, completion=4), reward=float("nan")) for i in range(2)]
    made = mini_batches(
        *stored(trajectories),
        Rank(),  # type: ignore[arg-type]
        updates=1,
        aggregation="token_mean",
        max_tokens=4,
        budget=100,
        packed=True,
    )
    assert made == [[]]
