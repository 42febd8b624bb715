"""Data-parallel replicas of vLLM: each of them is asked, and what is between them ends with this process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from moe_replay.engines.vllm.cpu import LocalExperts, all_gather_any, all_gather_sizes, reduce_scatter_sizes
from moe_replay.engines.vllm.engine import Replicas
from moe_replay.utils.processes import OrphanReaper


class Client:
    """vLLM's client of its engine cores: answers of each, and what was asked."""

    def __init__(self, answers: dict[str, dict[str, Any]]) -> None:
        self.core_engines = list(answers)
        self.asked: list[tuple[Any, ...]] = []
        self._answers = answers

    async def _call_utility_async(self, method: str, *arguments: Any, engine: str) -> Any:
        self.asked.append((engine, method, *arguments))
        return self._answers[engine][method]


def test_every_worker_of_every_replica_answers() -> None:
    client = Client({"first": {"collective_rpc": ["", ""]}, "second": {"collective_rpc": ["", "missing"]}})
    replicas = Replicas(SimpleNamespace(engine_core=client), lambda: None)
    assert replicas.count == 2
    assert asyncio.run(replicas.call_workers("replay_load", "file")) == ["", "", "", "missing"]
    call = "collective_rpc", "replay_load", None, ("file",), None
    assert client.asked == [("first", *call), ("second", *call)]


def test_a_prefix_cache_that_one_replica_has_kept_is_not_dropped() -> None:
    client = Client({"first": {"reset_prefix_cache": True}, "second": {"reset_prefix_cache": False}})
    assert asyncio.run(Replicas(SimpleNamespace(engine_core=client), lambda: None).reset_prefix_cache()) is False


def test_what_carries_the_mark_ends_with_the_process_that_guards_it() -> None:
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    marked, mark = os.environ | {"MARK_OF_THIS_TEST": "7"}, "MARK_OF_THIS_TEST=7"
    with subprocess.Popen(sleeper, env=marked) as guarded, subprocess.Popen(sleeper) as other:
        OrphanReaper(mark).close()
        assert guarded.poll() is None, "its guard has let it be"
        code = "import os; from moe_replay.utils.processes import OrphanReaper; "
        code += f"kept = OrphanReaper({mark!r}); os.kill(os.getpid(), 9)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
        assert guarded.wait(60) == -signal.SIGKILL
        assert other.poll() is None
        other.kill()


class _Experts:
    """A kernel that takes ids for those of its own two experts, which add 10 and 20 times the input."""

    def apply(self, *, output: torch.Tensor, hidden_states: torch.Tensor, **chosen: Any) -> None:
        factors = torch.tensor([10.0, 20.0])[chosen["topk_ids"].long()]
        output.copy_((chosen["topk_weights"] * factors).sum(-1, keepdim=True) * hidden_states)


class _OfThisRank(LocalExperts, _Experts):
    pass


def test_experts_of_other_ranks_add_nothing() -> None:
    tokens, output = torch.ones(2, 3), torch.zeros(2, 3)
    ids, weights = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32), torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    on_this_rank = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    _OfThisRank().apply(
        output=output, hidden_states=tokens, topk_ids=ids, topk_weights=weights, expert_map=on_this_rank
    )
    assert output[:, 0].tolist() == [0.5 * 20, 0.75 * 10]


def test_tokens_of_one_rank_are_gathered_and_given_back(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        tokens, ids = torch.rand(3, 2), torch.tensor([1, 2, 3])
        gathered = all_gather_sizes(None, [tokens, ids], 0, [3])
        assert torch.equal(gathered[0], tokens)
        assert torch.equal(gathered[1], ids)
        assert torch.equal(reduce_scatter_sizes(None, tokens, 0, [3]), tokens)
        assert torch.equal(all_gather_any(lambda *_: tokens, None, ids, 0), ids)
        assert all_gather_any(lambda *_: tokens, None, tokens + 1, 0) is tokens
    finally:
        dist.destroy_process_group()
