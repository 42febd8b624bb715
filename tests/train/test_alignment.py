"""The alignment tests of a training step: which micro-batch is looked at, and evidence over steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import moe_replay as mr
from moe_replay.train.learn.step_checks import Alignment
from tests.verification.routes import siblings, with_routes

PROMPT = 30


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)


def alignment() -> Alignment:
    topology = SimpleNamespace(layers=tuple(range(1, 4)), top_k=2, num_experts=8)
    return Alignment(SimpleNamespace(topology=topology, device=torch.device("cpu")))  # type: ignore[arg-type]


def micro_batch(seed: int, faulty: int = 0) -> Any:
    """8 siblings, of which the first ones have completions with the routes of the next sibling."""
    native, given = siblings(seed, layers=3, num_experts=8, top_k=2)
    wrong = list(given)
    for one in range(faulty):
        experts = given[one].routed_experts.copy()
        experts[PROMPT:] = given[one + 1].routed_experts[PROMPT:]
        wrong[one] = with_routes(given[one], experts)
    layout = mr.TokenLayout.packed([len(trace) for trace in native])
    trajectories = [SimpleNamespace(sampled=np.arange(len(trace)) >= PROMPT) for trace in native]
    return SimpleNamespace(
        layout=layout,
        trajectories=trajectories,
        native_routes={0: mr.RouteBatch.from_traces(native, layout)},
        rollout_routes={0: mr.RouteBatch.from_traces(wrong, layout)},
        is_dummy=False,
    )


def test_every_micro_batch_is_looked_at_sooner_or_later() -> None:
    batches: list[Any] = [SimpleNamespace(is_dummy=number == 2, number=number) for number in range(4)]
    chosen = [alignment().choose(batches, step) for step in range(40)]
    assert {batch.number for batch in chosen} == {0, 1, 3}  # type: ignore[union-attr]
    assert alignment().choose(batches, 7) is chosen[7]
    assert alignment().choose(batches[2:3], 0) is None


def test_a_fault_in_few_sequences_stops_the_run_after_a_few_steps() -> None:
    watched, evidence = alignment(), []
    with pytest.raises(mr.AlignmentError, match=r"sampled tokens are those of other sequences.*steps"):
        for step in range(12):
            watched.look_at(micro_batch(step, faulty=1), step)
            evidence.append(watched.check()["routing/misalignment_evidence"])
    assert evidence
    assert 0 < evidence[-1] < 10


def test_a_healthy_run_has_no_evidence_and_a_step_without_routes_is_unclear() -> None:
    watched = alignment()
    for step in range(3):
        watched.look_at(micro_batch(step), step)
        found = watched.check()
        assert found["routing/aligned"] == 1
        assert found["routing/misalignment_evidence"] < 0.1
    nothing = watched.check()
    assert np.isnan(nothing["routing/aligned"])
    assert nothing["routing/misalignment_evidence"] < 0.1
