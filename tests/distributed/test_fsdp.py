"""Replay under FSDP2: each rank has micro-batches of its own, and together they have the gradient of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import moe_replay as mr
from tests.distributed.harness import run_ranks
from tests.distributed.reference import (
    Outcome,
    check_other,
    check_same,
    data_parallel,
    differences,
    forward_arguments,
    from_wire,
    full_gradients,
    loss_of,
    move_routers,
    moved_model,
    one_process,
    recorded_traces,
    rollout_traces,
    sequences,
    to_wire,
)
from tests.routers.families import tiny_model
from tests.test_recompute import CHECKPOINTS

pytestmark = pytest.mark.distributed

FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
SIDES = ("left", "right")  # two micro-batches in flight on each rank, padded differently
WIDTH = 14

Ran = tuple[list[float], dict[str, torch.Tensor]]


# ---- on a rank -------------------------------------------------------------------------------------------------------


def shard(model: nn.Module, **options: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def my_seeds() -> list[int]:
    """The micro-batches of this rank."""
    return list(range(len(SIDES) * dist.get_rank(), len(SIDES) * (dist.get_rank() + 1)))


def loss_on_rank(model: nn.Module, seed: int, side: Any) -> torch.Tensor:
    layout, ids = layout_of(seed, side), sequences(seed)
    return loss_of(model(**forward_arguments(layout, ids)).logits, layout, ids)


def layout_of(seed: int, side: Any) -> mr.TokenLayout:
    return mr.TokenLayout.padded([len(ids) for ids in sequences(seed)], WIDTH, side)


def backward_last_first(model: nn.Module, losses: list[torch.Tensor]) -> Ran:
    for loss in reversed(losses):
        loss.backward()
    gradients = full_gradients(model)
    return [loss.item() for loss in losses], gradients if dist.get_rank() == 0 else {}


def replay_rollout(
    family: str, checkpoint: str, attached: str, routes: list[list[bytes]], mixed_precision: bool = False
) -> Ran:
    """R3: the routes of this rank's micro-batches come from elsewhere."""
    model = moved_model(family)
    replay = mr.attach(model) if attached == "before" else None
    if checkpoint != "none":
        CHECKPOINTS[checkpoint](model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, **({"mp_policy": policy} if mixed_precision else {}))
    replay = replay or mr.attach(model)

    losses = []
    for seed, side in zip(my_seeds(), SIDES, strict=True):
        batch = mr.RouteBatch.from_traces(from_wire(routes[seed]), layout_of(seed, side))
        with replay.replay(batch):
            losses.append(loss_on_rank(model, seed, side))
    return backward_last_first(model, losses)


def route_natively(family: str) -> Ran:
    model = moved_model(family)
    shard(model)
    return backward_last_first(model, [loss_on_rank(model, *job) for job in zip(my_seeds(), SIDES, strict=True)])


def record_and_replay(family: str, checkpoint: str) -> tuple[Ran, list[list[bytes]]]:
    """R2: the rank records the routes itself, the weights change, and it replays them."""
    model = tiny_model(family).train()
    if checkpoint != "none":
        CHECKPOINTS[checkpoint](model)
    shard(model)
    replay = mr.attach(model)

    recordings = []
    for seed, side in zip(my_seeds(), SIDES, strict=True):
        with torch.no_grad(), replay.record() as recording:
            loss_on_rank(model, seed, side)
        recordings.append(recording)
    move_routers(replay)

    losses, traces = [], []
    for seed, side, recording in zip(my_seeds(), SIDES, recordings, strict=True):
        with replay.replay(recording.batch()):
            losses.append(loss_on_rank(model, seed, side))
        traces.append(to_wire(recording.traces(layout_of(seed, side), sequences(seed))))
    return backward_last_first(model, losses), traces


# ---- all ranks together ----------------------------------------------------------------------------------------------


def together(ran: list[Ran]) -> Outcome:
    return Outcome([loss for losses, _ in ran for loss in losses], ran[0][1])


def expected(family: str, size: int, *details: Any) -> Outcome:
    return data_parallel([one_process(family, seed, *details) for seed in range(len(SIDES) * size)], size)


def routes_for(family: str, size: int) -> list[list[bytes]]:
    return [to_wire(rollout_traces(family, seed)) for seed in range(len(SIDES) * size)]


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("checkpoint", ["none", *CHECKPOINTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_equals_one_process(family, checkpoint, attached):
    ran = run_ranks(2, replay_rollout, family, checkpoint, attached, routes_for(family, 2))
    print(differences(together(ran), expected(family, 2)))
    check_same(together(ran), expected(family, 2))


@pytest.mark.parametrize(("family", "checkpoint"), list(zip(FAMILIES, ["transformers", "wrapper", "none"], strict=True)))
def test_four_ranks(family, checkpoint):
    ran = run_ranks(4, replay_rollout, family, checkpoint, "after", routes_for(family, 4))
    print(differences(together(ran), expected(family, 4)))
    check_same(together(ran), expected(family, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_native_routing_would_be_noticed(family):
    print(differences(together(run_ranks(2, route_natively, family)), expected(family, 2)))
    check_other(together(run_ranks(2, route_natively, family)), expected(family, 2))


@pytest.mark.parametrize("checkpoint", ["none", "transformers-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_replays_what_it_recorded(family, checkpoint):
    ran = run_ranks(2, record_and_replay, family, checkpoint)
    traces = [from_wire(received) for _, recorded in ran for received in recorded]
    assert traces == [recorded_traces(family, seed) for seed in range(len(traces))]
    check_same(together([outcome for outcome, _ in ran]), expected(family, 2, recorded_traces))


def test_mixed_precision():
    """Weights in bfloat16 round to 3 digits, and padding changes how: far less than other experts do."""
    ran = run_ranks(2, replay_rollout, "qwen3_moe", "transformers", "after", routes_for("qwen3_moe", 2), True)
    loss, gradient = differences(together(ran), expected("qwen3_moe", 2, rollout_traces, torch.bfloat16))
    print(loss, gradient)
    native = differences(together(run_ranks(2, route_natively, "qwen3_moe")), expected("qwen3_moe", 2))
    print(native)
    assert loss < 1e-2 < native[0]
    assert gradient < 5e-2 < native[1]
