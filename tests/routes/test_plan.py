"""The order of rows in all layers together is that of a stable sort in each."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_replay.errors import AlignmentError
from moe_replay.routes import plan as plans
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.plan import DispatchPlan, order_rows


def routes_of(num_experts: list[int], rows: int, top_k: int, seed: int = 0) -> RouteBatch:
    """Random routes of layers 1, 3, 5 ... with so many experts each, no expert twice in a row."""
    random = np.random.default_rng(seed)
    layers = [2 * index + 1 for index in range(len(num_experts))]
    chosen = {
        layer: torch.from_numpy(random.permuted(np.tile(np.arange(count), (rows, 1)), axis=1)[:, :top_k].copy())
        for layer, count in zip(layers, num_experts, strict=True)
    }
    topology = SimpleNamespace(top_k=top_k, num_experts=max(num_experts), layers=tuple(layers))
    return RouteBatch.recorded(chosen, topology)  # type: ignore[arg-type]


def experts_of(routes: RouteBatch, num_experts: list[int]) -> dict[int, int]:
    return dict(zip(routes.layers, num_experts, strict=True))


@given(
    num_experts=st.lists(st.sampled_from([4, 7, 128, 256, 300, 5000]), min_size=1, max_size=5),
    rows=st.integers(1, 40),
    top_k=st.integers(1, 4),
    seed=st.integers(0, 99),
    together=st.sampled_from([1, 100, 2**23]),
)
def test_each_layer_is_ordered_by_expert_then_by_token(
    num_experts: list[int], rows: int, top_k: int, seed: int, together: int
) -> None:
    routes = routes_of(num_experts, rows, top_k, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "MOST_PAIRS", together)
        plan = DispatchPlan.of(routes, experts_of(routes, num_experts))
    assert plan is not None
    for layer, count in experts_of(routes, num_experts).items():
        ids = routes.layer(layer)[0].numpy().astype(int).ravel()
        order = plan.layer(layer).order
        expected = np.argsort(ids, kind="stable")
        assert {part.dtype for part in order} == {torch.int32}
        assert order.pair.tolist() == expected.tolist()
        assert order.token.tolist() == (expected // top_k).tolist()
        assert order.row.reshape(-1)[order.pair.long()].tolist() == list(range(len(ids)))
        assert order.offsets.tolist() == np.bincount(ids, minlength=count).cumsum().tolist()


def test_ids_that_experts_do_not_have_come_last() -> None:
    """Of families whose routers also choose among what is no expert."""
    pair, row, offsets = order_rows(torch.tensor([[9, 0, 300, 1, 0]]), 2)
    assert pair.tolist() == [[1, 4, 3, 0, 2]]
    assert row.tolist() == [[3, 0, 4, 2, 1]]
    assert offsets.tolist() == [[2, 3]]


def test_a_batch_with_a_row_without_a_route_has_no_plan() -> None:
    routes = routes_of([8, 8], 5, 2)
    valid = routes.valid.clone()
    valid[1, 4] = False
    partial = RouteBatch(
        layers=routes.layers,
        routed_experts=routes.routed_experts,
        valid=valid,
        all_valid=(True, False),
        source_layers=routes.source_layers,
    )
    assert DispatchPlan.of(partial, experts_of(partial, [8, 8])) is None


def test_a_plan_of_other_routes_is_refused_and_says_what_differs() -> None:
    routes = routes_of([8, 8], 5, 2)
    experts = experts_of(routes, [8, 8])
    plan = DispatchPlan.of(routes, experts)
    assert plan is not None
    plan.check(routes, experts)
    for other, wanted, said in (
        (routes_of([8, 8], 6, 2), experts, "other rows"),
        (routes_of([8, 8], 5, 3), experts, "other experts per token"),
        (routes_of([8, 8], 5, 2, seed=1), experts, "another micro-batch"),
        (routes_of([8, 8], 5, 2), experts, "another micro-batch"),
        (routes, {1: 8}, "other layers"),
        (routes, {1: 8, 3: 16}, "other experts"),
    ):
        with pytest.raises(AlignmentError, match=f"not made of the routes that are replayed: {said}"):
            plan.check(other, wanted)
    routes.routed_experts[0, 0, 0] = 1
    with pytest.raises(AlignmentError, match="changed since"):
        plan.check(routes, experts)
