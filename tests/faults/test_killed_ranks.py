"""A rank that is killed in the middle of a step: the others end and name it, nothing is left, and the run resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import fork_python, fork_ranks_with_vllm
from tests.faults.processes import (
    LIMIT_S,
    descendants,
    rank_process,
    shared_memory,
    wait_for_line,
    wait_until_gone,
    wait_until_removed,
)
from tests.faults.test_signals import recipe
from tests.real_vllm.conftest import NEEDS_VLLM

pytestmark = pytest.mark.distributed

RANK = """
import sys, threading, time
import torch
from moe_replay.distributed import rank_watch
from moe_replay.distributed.ranks import raise_on_all_ranks, rank
from moe_replay.train import launch

rank_watch.GRACE_S = 60 if sys.argv[1] == "collective" else 0.5  # an error may take its time
with launch.process_group(torch.device("cpu")) as watch:
    try:
        with watch:
            print("ready", flush=True)
            if rank() == 0 and sys.argv[1] == "finished":
                watch.stop()
            if rank() == 1 or sys.argv[1] == "hangs":
                threading.Event().wait()
            if sys.argv[1] == "collective":
                with raise_on_all_ranks("work"):
                    pass
            sys.stdin.read()
            time.sleep(2)
            print("went on", flush=True)
    except rank_watch.RankLostError as error:
        print(f"{error.known_on_all_ranks}: {error}", flush=True)
"""


@pytest.mark.parametrize(
    ("rank_0", "told"),
    [
        ("hangs", "rank 0: rank 1 ended during the run: ending"),
        ("collective", "False: rank 1 ended during the run. "),
        ("finished", "went on"),
    ],
)
def test_a_rank_names_the_one_that_was_killed(rank_0: str, told: str, port: int) -> None:
    """Whether it waits for it or for something else; once a run is over, ranks may end one after the other."""
    ranks = []
    for number in range(2):
        place = {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(fork_python(RANK, rank_0, environment=place | {"GLOO_SOCKET_IFNAME": "lo"}))
    first, second = ranks
    with first, second:
        for each in ranks:
            wait_for_line(each.stdout, "ready")
        second.kill()
        second.wait(LIMIT_S)
        told_by_first, _ = first.communicate(timeout=LIMIT_S)
    assert told in told_by_first
    assert first.returncode == (1 if rank_0 == "hangs" else 0)


# ---- the real vLLM ---------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_killed_rank_ends_the_others_and_the_engine(demo_files: Any, tmp_path: Path) -> None:
    """Rank 1, then, in the resumed run, the one with the engine, each while a step is being sampled."""
    pytest.importorskip("vllm", reason=NEEDS_VLLM)
    from tests.faults.test_vllm_processes import ENGINE, QUIET, WITHOUT_WORKER, engine_core

    made = recipe(
        demo_files,
        tmp_path,
        steps=1000,
        rollout={"engine": "vllm", "dtype": "float32", "options": ENGINE},
        replay={"compare_every": 0},
        checkpoint={"every": 1, "keep": 2},
        reward={"functions": ["tests.faults.hanging:announced"]},
    )
    for reached, number, environment in ((1, 1, WITHOUT_WORKER), (2, 0, QUIET)):
        with fork_ranks_with_vllm("train", made, environment=environment) as agent:
            wait_for_line(agent.stdout, f"step {reached}/1000")
            wait_for_line(agent.stdout, "rewarding")
            below = descendants(agent.pid)
            files = shared_memory(below)
            assert engine_core(agent.pid) in below
            rank = rank_process(agent.pid, number)
            assert rank is not None
            os.kill(rank.pid, signal.SIGKILL)
            rest = agent.stdout.read()
            assert agent.wait(LIMIT_S) != 0
        assert f"error on rank {1 - number}: rank {number} ended during the run. " in rest
        assert rest.count("error on rank") == 1
        assert "could not be written" not in rest
        assert wait_until_gone(below) == []
        assert wait_until_removed(files) == []
