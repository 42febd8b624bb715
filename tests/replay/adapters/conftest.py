"""What tests of routers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from moe_replay.megatron import cpu as megatron_cpu
from tests.distributed.megatron_models import start


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron-Core on the CPU, with one rank, and everything taken back afterwards."""
    store = tmp_path_factory.mktemp("megatron") / "rendezvous"
    with megatron_cpu.enabled():
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
        start()
        yield
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
