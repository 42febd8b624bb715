"""Replay under FSDP2: each rank has micro-batches of its own, and together they have the gradient of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import moe_replay as mr
from tests.combinations import with_thorough, with_whole_runs
from tests.distributed.harness import run_ranks
from tests.distributed.reference import (
    Outcome,
    backward_last_first,
    check_other,
    check_same,
    data_parallel,
    differences,
    forward_arguments,
    from_wire,
    loss_of,
    move_routers,
    moved_model,
    one_process,
    recorded_traces,
    rollout_traces,
    sequences,
    to_wire,
)
from tests.replay.adapters.families import tiny_model
from tests.replay.checkpointing import CHECKPOINTS

FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
SIDES = ("left", "right")  # two micro-batches in flight on each rank, padded differently
WIDTH = 14

# ---- on a rank -------------------------------------------------------------------------------------------------------


def shard(model: nn.Module, mixed_precision: bool = False) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed_precision else MixedPrecisionPolicy()
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def my_micro_batches() -> Iterator[tuple[int, mr.TokenLayout]]:
    for i, side in enumerate(SIDES):
        seed = len(SIDES) * dist.get_rank() + i
        yield seed, mr.TokenLayout.padded([len(ids) for ids in sequences(seed)], WIDTH, side)


def loss_on_rank(model: nn.Module, seed: int, layout: mr.TokenLayout) -> Tensor:
    ids = sequences(seed)
    return loss_of(model(**forward_arguments(layout, ids)).logits, layout, ids)


def replay_rollout(
    family: str, checkpoint: str, attached: str, routes: list[list[bytes]], mixed_precision: bool = False
) -> tuple:
    """R3: the routes of this rank's micro-batches come from elsewhere."""
    model = moved_model(family)
    replay = mr.attach(model) if attached == "before" else None
    if checkpoint != "none":
        CHECKPOINTS[checkpoint](model)
    shard(model, mixed_precision)
    replay = replay or mr.attach(model)

    losses = []
    for seed, layout in my_micro_batches():
        with replay.replay(mr.RouteBatch.from_traces(from_wire(routes[seed]), layout)):
            losses.append(loss_on_rank(model, seed, layout))
    return tuple(backward_last_first(model, losses))


def record_and_replay(family: str, checkpoint: str) -> tuple[tuple, list[list[bytes]]]:
    """R2: the rank records the routes itself, the weights change, and it replays them."""
    model = tiny_model(family).train()
    if checkpoint != "none":
        CHECKPOINTS[checkpoint](model)
    shard(model)
    replay = mr.attach(model)

    recordings = []
    for seed, layout in my_micro_batches():
        with torch.no_grad(), replay.record() as recording:
            loss_on_rank(model, seed, layout)
        recordings.append(recording)
    move_routers(replay)

    losses, traces = [], []
    for (seed, layout), recording in zip(my_micro_batches(), recordings, strict=True):
        with replay.replay(recording.batch()):
            losses.append(loss_on_rank(model, seed, layout))
        traces.append(to_wire(recording.traces(layout, sequences(seed))))
    return tuple(backward_last_first(model, losses)), traces


def route_natively(family: str, mixed_precision: bool = False) -> tuple:
    model = moved_model(family)
    shard(model, mixed_precision)
    losses = [loss_on_rank(model, seed, layout) for seed, layout in my_micro_batches()]
    return tuple(backward_last_first(model, losses))


# ---- all ranks together ----------------------------------------------------------------------------------------------


def together(of_ranks: list[tuple]) -> Outcome:
    """All losses; the gradients are the same on every rank once they are whole."""
    outcomes = [Outcome(*outcome) for outcome in of_ranks]
    return Outcome([loss for outcome in outcomes for loss in outcome.losses], outcomes[0].gradients)


def expected(family: str, size: int, *details: Any) -> Outcome:
    return data_parallel([one_process(family, seed, *details) for seed in range(len(SIDES) * size)], size)


def routes_for(family: str, size: int) -> list[list[bytes]]:
    return [to_wire(rollout_traces(family, seed)) for seed in range(len(SIDES) * size)]


COMBINATIONS = [
    (family, checkpoint, ("before", "after")[(i + j) % 2])
    for i, family in enumerate(FAMILIES)
    for j, checkpoint in enumerate(("none", *CHECKPOINTS))
]
# Without these there is every family, and every kind of checkpointing attached before and after it.
THOROUGH = [*COMBINATIONS[1:5:2], *COMBINATIONS[10:15:2]]


@pytest.mark.parametrize(("family", "checkpoint", "attached"), with_thorough(COMBINATIONS, THOROUGH))
def test_replay_equals_one_process(family, checkpoint, attached):
    ran = run_ranks(2, replay_rollout, family, checkpoint, attached, routes_for(family, 2))
    check_same(together(ran), expected(family, 2))


@pytest.mark.parametrize(
    ("family", "checkpoint"),
    with_whole_runs(
        [("qwen3_moe", "transformers"), ("deepseek_v3", "wrapper"), ("gpt_oss", "none")],
        [("qwen3_moe", "transformers"), ("gpt_oss", "none")],
    ),
)
def test_four_ranks(family, checkpoint):
    ran = run_ranks(4, replay_rollout, family, checkpoint, "after", routes_for(family, 4))
    check_same(together(ran), expected(family, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_native_routing_would_be_noticed(family):
    check_other(together(run_ranks(2, route_natively, family)), expected(family, 2))


@pytest.mark.parametrize("checkpoint", with_whole_runs(["none", "transformers-reentrant"], ["none"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_replays_what_it_recorded(family, checkpoint):
    ran = run_ranks(2, record_and_replay, family, checkpoint)
    traces = [from_wire(received) for _, recorded in ran for received in recorded]
    assert traces == [recorded_traces(family, seed) for seed in range(len(traces))]
    check_same(together([outcome for outcome, _ in ran]), expected(family, 2, recorded_traces))


def test_mixed_precision():
    """bfloat16 has three digits, and padded sequences round otherwise than lone ones: less than other experts do."""
    family = "qwen3_moe"
    alone = expected(family, 2, rollout_traces, torch.bfloat16)
    replayed = run_ranks(2, replay_rollout, family, "transformers", "after", routes_for(family, 2), True)
    loss, gradient = differences(together(replayed), alone)
    native_loss, native_gradient = differences(together(run_ranks(2, route_natively, family, True)), alone)
    assert loss < 1e-2 < native_loss
    assert gradient < 5e-2 < 1 < native_gradient
