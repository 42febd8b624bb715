"""torchrun --max-restarts: a rank that dies in any part of a step costs that step, and the run goes on by itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forked import fork_python
from tests.faults.processes import LIMIT_S, descendants, wait_for_line, wait_until_gone
from tests.faults.test_signals import recipe

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# Rank 1 kills itself in the first part of step 2, then in the second part of step 3, and so on.
AGENT = """
import os, signal, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from moe_replay.cli.main import main
from moe_replay.report import run_report
from moe_replay.train.run import Job
from moe_replay.train.learn.learner import Learner

PARTS = [(Job, "rollout"), (Learner, "score"), (Learner, "update"), (Job, "sync_weights"), (Job, "save")]
now = {"step": 0}

def begun(job, *arguments):
    now["step"] = job.completed_steps + 1
    return rollout(job, *arguments)

def dying(number):
    owner, name = PARTS[number]
    method = getattr(owner, name)

    def call(*arguments, **named):
        if (name == "rollout" and arguments[0].completed_steps or now["step"] - 1) == number + 1:
            os.write(1, f"dying in {name}.\\n".encode())  # whole, among what the other rank prints
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments, **named)

    setattr(owner, name, call)

def rank(recipe):
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if sys.argv[2] == "dying" and restarts < len(PARTS) and os.environ["RANK"] == "1":
        dying(restarts)
    sys.argv[:] = ["moe-replay", "train", recipe]
    main()

rollout, Job.rollout = Job.rollout, begun
run_report.write_run_report = lambda folder: folder  # seconds of drawing, and not what is tested here
ranks = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "start_method": "fork"}
place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
print("agent", flush=True)
elastic_launch(LaunchConfig(**ranks, **place, max_restarts=5, monitor_interval=0.1), rank)(sys.argv[1])
"""
PARTS = ["rollout", "score", "update", "sync_weights", "save"]


@pytest.mark.whole_runs
def test_a_run_survives_the_death_of_a_rank_in_every_part_of_a_step(demo_files: Any, tmp_path: Path) -> None:
    """Each time the other rank ends and names it; in the end the run is that of ranks that never died."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("calm", "dying"):
        folder = tmp_path / kind
        folder.mkdir()
        made = recipe(
            demo_files,
            folder,
            steps=7,
            replay={"score_native_every": 0},
            checkpoint={"every": 1, "keep": 2, "export": False},
        )
        with fork_python(AGENT, made, kind, environment={"GLOO_SOCKET_IFNAME": "lo"}) as agent:
            wait_for_line(agent.stdout, "agent")
            told = agent.stdout.read()
            assert agent.wait(LIMIT_S) == 0, told
            assert wait_until_gone(descendants(agent.pid)) == []
        found[kind] = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        deaths = re.findall(r"dying in (\w+)\.", told)
        assert deaths == (PARTS if kind == "dying" else []), told
        # Rank 0 says so when it stops by itself, when it is ended because it did not, or both.
        assert told.count("rank 0: rank 1 ended during the run") >= len(deaths), told
        # The first checkpoint may not have been written yet when a rank dies in step 2.
        assert told.count("resuming after step") in (range(len(deaths) - 1, len(deaths) + 1) if deaths else [0])
    assert [line["step"] for line in found["dying"]] == list(range(1, 8))
    for name in ("reward/mean", "loss/total", "completion/length_mean", "optim/grad_norm"):
        assert [line.get(name) for line in found["dying"]] == [line.get(name) for line in found["calm"]]
