"""The driver of a run on Ray: Ctrl-C, its death, and errors of ranks and engines. Each has a cluster of its own."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from moe_replay.errors import ExitStatus
from tests.faults.forked import fork_command
from tests.faults.processes import LIMIT_S, descendants, wait_for_line, wait_until_gone
from tests.faults.test_signals import recipe

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.engine]

RAY = {"launcher": "ray", "engines": 1, "placement": "colocated"}
ALONE = {"RAY_ADDRESS": ""}


@pytest.mark.whole_runs
def test_a_killed_run_leaves_nothing_running_and_an_interrupted_one_is_saved(demo_files: Any, tmp_path: Path) -> None:
    """The engine is in the bundle of the rank, and sleeps while the rank learns."""
    turns = {"rollout": {"sleep": True}, "backend": {"device": "cpu", "offload": True}}
    every = {"replay": {"score_native_every": 0}, "checkpoint": {"every": 2}}
    made = recipe(demo_files, tmp_path, steps=400, cluster=RAY, **turns, **every)
    with fork_command("train", made, environment=ALONE) as run:
        wait_for_line(run.stdout, "ray: new local cluster")
        wait_for_line(run.stdout, "step 3/400")
        killed = descendants(run.pid)
        assert len(killed) > 4  # of Ray, the rank and the engine
        run.kill()
        assert run.wait(LIMIT_S) == -signal.SIGKILL
    with fork_command("train", made, environment=ALONE) as run:
        wait_for_line(run.stdout, "resuming after step")
        wait_for_line(run.stdout, "step")
        started = descendants(run.pid)
        run.send_signal(signal.SIGINT)
        rest = run.stdout.read()
        assert run.wait(LIMIT_S) == ExitStatus.INTERRUPTED, rest
    assert "finishing the step, then saving" in rest
    assert "to resume: moe-replay train" in rest
    assert newest_checkpoint(tmp_path / "run") == json.loads(last_line(tmp_path / "run" / "metrics.jsonl"))["step"]
    assert wait_until_gone(started) == []
    assert wait_until_gone(killed) == []  # agents of Ray look for its head for a minute


def newest_checkpoint(run: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def last_line(file: Path) -> str:
    return file.read_text().splitlines()[-1]


@pytest.mark.thorough
def test_an_error_of_an_engine_is_the_error_of_the_run(demo_files: Any, tmp_path: Path) -> None:
    options = {"options": {"no_such_option": 1}}
    made = recipe(demo_files, tmp_path, cluster=RAY, backend={"device": "cpu"}, rollout=options)
    with fork_command("train", made, environment=ALONE) as run:
        told = run.stdout.read()
        assert run.wait(LIMIT_S) == ExitStatus.FAILED, told
    (error,) = re.findall(r"^error: .*", told, re.MULTILINE)
    assert "engine 0 did not start" in error
    assert "no_such_option" in error
    assert "Traceback" not in told
