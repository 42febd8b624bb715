"""Replay under FSDP2: each rank has micro-batches of its own, and all together have the gradient of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import moe_replay as mr
from tests.distributed.harness import run_ranks
from tests.distributed.reference import *
from tests.test_recompute import CHECKPOINTS

pytestmark = pytest.mark.distributed

FAMILIES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
IN_FLIGHT = 2


def shard(model, **options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def on_rank(family, checkpoint, attached, travelled, replayed=True, **options):
    rank, size = dist.get_rank(), dist.get_world_size()
    model = moved_model(family)
    if attached == "before":
        replay = mr.attach(model)
    if checkpoint: CHECKPOINTS[checkpoint](model)
    shard(model, **options)
    if attached == "after":
        replay = mr.attach(model)
    losses = []
    for i, side in enumerate(["left", "right"]):
        traces = unpacked(travelled[rank * 2 + i])
        ids = [t.token_ids for t in traces]
        layout = mr.TokenLayout.padded([len(t) for t in traces], 14, side)
        batch = mr.RouteBatch.from_traces(traces, layout)
        with replay.replay(batch):
            losses.append(loss_of(model(**fed(layout, ids)).logits, layout, ids, layout.num_tokens))
    for l in reversed(losses):
        l.backward()
    g = full_gradients(model)
    return [l.item() for l in losses], g if rank == 0 else {}

import time
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("checkpoint", [None, *CHECKPOINTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_same(family, checkpoint, attached, size):
    seeds = range(size * 2)
    exp = mean_of([replayed_alone(family, s) for s in seeds], size)
    res = run_ranks(size, on_rank, family, checkpoint, attached, packed_for_travel(traces_as_sampled(family, s) for s in seeds))
    found = Outcome([l for r in res for l in r[0]], res[0][1])
    print(max(abs(a - b) for a, b in zip(found.losses, exp.losses)), distance(found.gradients, exp.gradients))
    check_same(found, exp)
