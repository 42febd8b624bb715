from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
import moe_replay as mr
from tests.distributed.harness import run_ranks
from tests.distributed.reference import *
from tests.routers.families import tiny_model
from tests.test_recompute import CHECKPOINTS

pytestmark = pytest.mark.distributed

ROUTER = {"gpt_oss": "router"}
def plan_of(name, family):
    gate = ROUTER.get(family, "gate")
    masked = {f"model.layers.*.mlp.{gate}": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
    return {"tp": dict(tp_size=2), "masked": dict(tp_size=2, ep_size=2, ep_plan=masked), "dispatch": dict(tp_size=2, ep_size=2),
    "fsdp_ep": dict(fsdp_size=2, ep_size=2), "fsdp4_ep": dict(fsdp_size=4, ep_size=2), "masked_only": dict(tp_size=2, tp_plan={}, ep_size=2, ep_plan=masked)}[name]

def layout_of(seed):
    return mr.TokenLayout.padded([len(ids) for ids in sequences(seed)], 14, "left")
def run(model, seed, replay=None, batch=None):
    lay, ids = layout_of(seed), sequences(seed)
    import contextlib
    with (replay.replay(batch) if replay else contextlib.nullcontext()):
        loss = loss_of(model(**forward_arguments(lay, ids)).logits, lay, ids)
    loss.backward()
    g = full_gradients(model)
    model.zero_grad()
    return [loss.item()], g

def on_rank(path, family, plan, checkpoint, routes):
    conf = DistributedConfig(**plan_of(plan, family))
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=conf).train()
    seed = 0 if conf.fsdp_size == 1 else dist.get_rank()
    replay = mr.attach(model)
    with torch.no_grad(), replay.record() as recording:
        model(**forward_arguments(layout_of(seed), sequences(seed)))
    rec = to_wire(recording.traces(layout_of(seed), sequences(seed)))
    move_routers(replay)
    if checkpoint != "none": CHECKPOINTS[checkpoint](model)
    batch = mr.RouteBatch.from_traces(from_wire(routes[seed]), layout_of(seed))
    r = run(model, seed, replay, batch)
    replay.detach()
    n = run(model, seed)
    return rec, r, n

@pytest.mark.parametrize("checkpoint", ["none", "transformers", "transformers-reentrant"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("plan", ["tp", "masked", "dispatch", "fsdp_ep", "fsdp4_ep"])
def test_it(tmp_path, family, checkpoint, plan):
    tiny_model(family).save_pretrained(tmp_path)
    size = 4 if plan == "fsdp4_ep" else 2
    seeds = range(size)
    res = run_ranks(size, on_rank, str(tmp_path), family, plan, checkpoint, [to_wire(rollout_traces(family, s)) for s in seeds])
    fs = "fsdp" in plan
    for rank, (rec, r, n) in enumerate(res):
        assert from_wire(rec) == recorded_traces(family, rank if fs else 0)
        if fs: 
            r, n = ([l for x in res for l in x[i][0]] for i in (1, 2)); r = (r, res[rank][1][1]); n = (n, res[rank][2][1])
            exp = data_parallel([one_process(family, s) for s in seeds], size)
        else: exp = one_process(family, 0)
        a, b = Outcome(*r), Outcome(*n)
        print(plan, family, checkpoint, rank, differences(a, exp), "native", differences(b, exp))
        rd = relative_differences(a.gradients, exp.gradients)
        bad = {k: v for k, v in rd.items() if v > 1e-5}
        if bad: print(bad)
    assert not bad
