"""The process group of a run, and what is left of it afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from moe_replay.train.setup.launch import process_group


@pytest.mark.skipif(
    not hasattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats"), reason="this torch has no such cache"
)
def test_no_cache_of_dtensor_keeps_the_group_of_an_ended_run() -> None:
    """A group that only this thread's cache kept crashed vLLM's processes, which another thread forks."""

    def shardings() -> int:
        return sum(torch._C._get_DTensor_sharding_propagator_cache_stats())

    with process_group(torch.device("cpu")):
        model = fully_shard(nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert shardings() > 0
    assert shardings() == 0
