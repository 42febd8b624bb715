"""Replay under the tensor- and expert-parallel plans of Transformers.

Ranks of a tensor-parallel group see the same tokens, so that their layout knows nothing of the plan; routes name
experts by their global id, wherever the experts are.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moe_replay as mr
from tests.combinations import with_thorough, with_whole_runs
from tests.distributed.harness import run_ranks
from tests.distributed.rank import Share, record_and_replay
from tests.distributed.reference import (
    Outcome,
    check_other,
    check_same,
    data_parallel,
    from_wire,
    one_process,
    recorded_traces,
    rollout_traces,
    to_wire,
)
from tests.replay.adapters.families import tiny_model

FEWER = {"mixtral", "glm4_moe"}  # as the others; left to `make test-long`


def masked(family: str) -> dict[str, str]:
    """Every rank keeps all tokens, and its router leaves other ranks' experts out."""
    router = "router" if family == "gpt_oss" else "gate"
    return {f"model.layers.*.mlp.{router}": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}


class Plan(NamedTuple):
    """Sizes of the meshes, and what the model's own expert-parallel plan is overruled by."""

    tensor: int = 1
    expert: int = 1
    data: int = 1
    overruled: dict[str, str] | None = None

    @property
    def config(self) -> DistributedConfig:
        return DistributedConfig(tp_size=self.tensor, ep_size=self.expert, fsdp_size=self.data, ep_plan=self.overruled)


# ---- on a rank -------------------------------------------------------------------------------------------------------


def on_rank(folder: str, plan: Plan, routes: list[list[bytes]]) -> tuple:
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan.config).train()
    mine = routes[dist.get_rank() // plan.tensor]
    layout = mr.TokenLayout.padded([len(trace) for trace in from_wire(mine)], side="left").pad_to(multiple_of=8)
    return record_and_replay(model, layout, mine)


# ---- all ranks together ----------------------------------------------------------------------------------------------


def check_plan(family: str, plan: Plan, folder: Path) -> None:
    """On every rank: recorded ids are global ones, replay is one process's, and native routing is not."""
    tiny_model(family).save_pretrained(folder)
    seeds = range(plan.data)
    routes = [to_wire(rollout_traces(family, seed)) for seed in seeds]
    averaged = data_parallel([one_process(family, seed) for seed in seeds], plan.data).gradients
    for rank, parts in enumerate(run_ranks(plan.data * plan.tensor, on_rank, str(folder), plan, routes)):
        share, seed = Share.received(parts), rank // plan.tensor
        expected = Outcome(one_process(family, seed).losses, averaged)
        assert from_wire(share.recorded) == recorded_traces(family, seed)
        for outcome in share.replayed.values():
            check_same(outcome, expected)
        check_other(share.native, expected)


@pytest.mark.parametrize(
    "family",
    with_whole_runs(with_thorough(["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"], FEWER), ["deepseek_v3"]),
)
def test_tensor_parallel(family, tmp_path):
    check_plan(family, Plan(tensor=2), tmp_path)


@pytest.mark.parametrize(
    "family", with_whole_runs(with_thorough(["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss"], FEWER), ["gpt_oss"])
)
def test_experts_masked_on_other_ranks(family, tmp_path):
    """The router's output is cut down to local ids after its choice was made."""
    check_plan(family, Plan(tensor=2, expert=2, overruled=masked(family)), tmp_path)


@pytest.mark.parametrize(
    "family", with_whole_runs(with_thorough(["qwen3_moe", "deepseek_v3", "gpt_oss"], {"deepseek_v3"}), ["gpt_oss"])
)
def test_tokens_dispatched_to_experts(family, tmp_path):
    check_plan(family, Plan(tensor=2, expert=2), tmp_path)


@pytest.mark.whole_runs
def test_fully_sharded_with_tensor_parallel(tmp_path):
    check_plan("qwen3_moe", Plan(tensor=2, data=2), tmp_path)


def test_fully_sharded_with_dispatched_tokens(tmp_path):
    """Two ranks hold each expert. With one (data == expert) Transformers shrinks its gradient, replayed or not."""
    check_plan("glm4_moe", Plan(expert=2, data=4), tmp_path)
