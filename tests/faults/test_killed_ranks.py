"""A rank that is killed: the others end and name it. With vLLM, and resumed: test_vllm_processes.py."""

from __future__ import annotations

import pytest

from moe_replay.errors import ExitStatus
from tests.faults.forked import fork_python
from tests.faults.processes import LIMIT_S, wait_for_line

pytestmark = pytest.mark.distributed

RANK = """
import sys, threading, time
import torch
from moe_replay.distributed import rank_watch
from moe_replay.distributed.ranks import raise_on_all_ranks, rank
from moe_replay.train.setup import launch

rank_watch.EXIT_GRACE_S = 60 if sys.argv[1] == "collective" else 0.5  # an error may take its time
with launch.process_group(torch.device("cpu")) as watch:
    try:
        with watch:
            if rank() == 0 and sys.argv[1] == "finished":
                watch.stop()  # the other one is killed once this one is ready
            print("ready", flush=True)
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
    assert first.returncode == (ExitStatus.FAILED if rank_0 == "hangs" else 0)
