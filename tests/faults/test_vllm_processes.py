"""The real vLLM under signals and kills: it finishes the step, and nothing of it outlives the process it serves.

All are forked; `make test-long` has the server as the real command too, of which vLLM spawns its processes, and `make
test-faults` adds kills of such processes at random moments, with counts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_replay.utils.processes import owned_folder, start_time
from tests.combinations import with_thorough
from tests.faults.forked import Forked, fork_ranks_with_vllm, fork_with_vllm
from tests.faults.hanging import HELD_BY
from tests.faults.processes import (
    LIMIT_S,
    Process,
    descendants,
    named_sockets,
    process,
    rank_process,
    shared_memory,
    start_command,
    start_ranks,
    title,
    wait_for_line,
    wait_until_gone,
    wait_until_removed,
)
from tests.faults.test_signals import recipe
from tests.ports import answers, reserved_port
from tests.real_vllm.conftest import NEEDS_VLLM

pytest.importorskip("vllm", reason=NEEDS_VLLM)
pytestmark = pytest.mark.engine

ENGINE: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 2**26}
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "MOE_REPLAY_TOKEN": "secret"}
QUIET |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # a worker below the core, as on several GPUs, and shared memory
WITHOUT_WORKER = QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the core computes itself, as on one GPU


def engine_core(pid: int) -> Process:
    """The process in which vLLM computes."""
    (found,) = [each for each in descendants(pid) if "EngineCore" in title(each.pid)]
    return found


def vllm_recipe(demo_files: Any, folder: Path, **overrides: Any) -> str:
    rollout = {"engine": "vllm", "dtype": "float32", "options": ENGINE}
    return recipe(demo_files, folder, rollout=rollout, replay={"score_native_every": 0}, **overrides)


def start_training(made: str) -> subprocess.Popen[str]:
    return start_command("train", made, environment=QUIET)


def server_words(demo_files: Any, port: int) -> list[str]:
    words = ["rollout", "--model", str(demo_files.model), "--dtype", "float32", "--max-length", "64"]
    options = [str(word) for pair in ENGINE.items() for word in pair]
    return [*words, "--port", str(port), "--engine-options", *options]


def start_server(demo_files: Any, port: int) -> subprocess.Popen[str]:
    return start_command(*server_words(demo_files, port), environment=QUIET)


def fork_server(demo_files: Any, port: int) -> Forked:
    return fork_with_vllm(*server_words(demo_files, port), environment=QUIET)


def wait_until_healthy(server: subprocess.Popen[str] | Forked, port: int) -> None:
    while server.poll() is None:
        if answers(port):
            return
        time.sleep(0.2)
    raise AssertionError(f"the server did not start: {server.stdout.read() if server.stdout else ''}")


@pytest.mark.thorough  # test_signals.py has both with the other engine
def test_ctrl_c_and_a_second_signal(demo_files: Any, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group and the step is saved; then an engine that hangs, and two signals."""
    rewards, holding = {"functions": ["tests.faults.hanging:held"]}, tmp_path / "holding"
    made = vllm_recipe(demo_files, tmp_path, steps=1000, checkpoint={"every": 0}, reward=rewards)
    held_by = {HELD_BY: str(holding)}
    with fork_with_vllm("train", made, environment=WITHOUT_WORKER | held_by) as run:
        wait_for_line(run.stdout, "step 1/1000")
        below, core = descendants(run.pid), engine_core(run.pid)
        files = shared_memory(below)
        assert os.getpgid(core.pid) != os.getpgid(run.pid)
        os.killpg(run.pid, signal.SIGINT)
        rest = run.stdout.read()
        assert run.wait(LIMIT_S) == 75, rest
    assert wait_until_gone(below) == []
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    assert checkpoint.name > "step-00000000"
    with fork_with_vllm("train", made, environment=QUIET | held_by) as run:
        wait_for_line(run.stdout, f"step {int(checkpoint.name.removeprefix('step-')) + 1}/1000")
        below, core = descendants(run.pid), engine_core(run.pid)
        files |= shared_memory(below)
        holding.touch()
        wait_for_line(run.stdout, "held")  # in the middle of a step, which ends with new weights for the engine
        os.kill(core.pid, signal.SIGSTOP)  # whatever waits for it waits forever
        run.send_signal(signal.SIGTERM)
        holding.unlink()
        time.sleep(1)  # it does not end by the first one
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        assert run.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert wait_until_gone(below) == []
    assert wait_until_removed(files) == []


def owner(pid: int) -> str:
    """How `owned_folder` names the folders of a process, but for what is random."""
    with owned_folder() as mine:
        own_name = mine.name.rpartition("-")[0]
    return own_name.replace(f"-{os.getpid()}-{start_time(os.getpid())}", f"-{pid}-{start_time(pid)}")


@pytest.mark.parametrize("command", ["train", "rollout"])
def test_ctrl_c_while_vllm_starts(demo_files: Any, tmp_path: Path, port: int, command: str) -> None:
    """It ends its processes rather than wait for their start, which is held here."""
    words = ["train", vllm_recipe(demo_files, tmp_path)] if command == "train" else server_words(demo_files, port)
    with fork_with_vllm(*words, environment=QUIET) as run:
        while not (cores := [each for each in descendants(run.pid) if "EngineCore" in title(each.pid)]):
            assert run.poll() is None, run.stdout.read()
            time.sleep(0.05)
        os.kill(cores[0].pid, signal.SIGSTOP)  # it will never be ready
        below = descendants(run.pid)
        sockets = named_sockets([*below, process(run.pid)])
        os.killpg(run.pid, signal.SIGINT)
        rest = run.stdout.read()
        assert run.wait(LIMIT_S) == (75 if command == "train" else 128 + signal.SIGINT), rest
    assert "Traceback" not in rest
    assert ("interrupted before the first step" in rest) == (command == "train")
    assert wait_until_gone(below) == []
    assert [path for path in sockets if path.exists()] == []


@pytest.mark.distributed
@pytest.mark.whole_runs
def test_a_killed_rank_ends_the_others_and_the_engine(demo_files: Any, tmp_path: Path) -> None:
    """Rank 1, then, in the resumed run, the one with the engine, each while a step is being sampled."""
    made = recipe(
        demo_files,
        tmp_path,
        steps=1000,
        rollout={"engine": "vllm", "dtype": "float32", "options": ENGINE},
        replay={"score_native_every": 0},
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


@pytest.mark.parametrize("start", with_thorough([fork_server, start_server], [start_server]))
@pytest.mark.whole_runs
def test_sigterm_ends_a_server_and_its_engine(demo_files: Any, port: int, start: Callable[[Any, int], Any]) -> None:
    with start(demo_files, port) as server:
        wait_until_healthy(server, port)
        below = descendants(server.pid)
        sockets = named_sockets([*below, process(server.pid)])
        assert sockets
        assert {path.parent.name.rpartition("-")[0] for path in sockets} == {owner(server.pid)}  # for the next start
        stores = set(Path(tempfile.gettempdir()).glob(f"{owner(server.pid)}-*/vllm_dist_*"))
        assert stores  # of its workers: vLLM would leave one in the folder of all temporary files
        files = shared_memory(below) | sockets | stores
        assert engine_core(server.pid) in below
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 0
    assert wait_until_gone(below) == []
    assert wait_until_removed(files) == []


# ---- make test-faults -----------------------------------------------------------------------------------------------

KILLS = int(os.environ.get("MOE_REPLAY_KILLS", "0"))


@pytest.mark.skipif(not KILLS, reason="`make test-faults` runs it")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("victim", ["trainer", "server", "rank 0", "rank 1", "engine core"])
def test_kills_at_random_moments_leave_nothing(
    victim: str, demo_files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By SIGKILL, from the moment on that the first process below it exists, during vLLM's start and afterwards."""
    drawn = random.Random(0)
    made = vllm_recipe(demo_files, tmp_path, steps=1000, checkpoint={"every": 1, "keep": 2})
    for number in range(KILLS):
        with reserved_port() as port:
            begin: dict[str, Callable[[], subprocess.Popen[str]]] = {
                "server": lambda port=port: start_server(demo_files, port),
                "rank": lambda: start_ranks("train", made, environment=QUIET),
            }
            with begin.get(victim.split()[0], lambda: start_training(made))() as run:
                while run.poll() is None and (found := killed(run.pid, victim)) is None:
                    time.sleep(0.05)
                time.sleep(drawn.uniform(0, 40))
                below = [*descendants(run.pid), process(run.pid)]
                files = shared_memory(below)
                assert found is not None
                os.kill(found.pid, signal.SIGKILL)
                assert run.wait(LIMIT_S) != 0
        assert wait_until_gone(below) == []
        assert wait_until_removed(files) == []
        with capsys.disabled():
            print(f"{victim}: killed {number + 1} of {KILLS}, {len(below) - 1} processes below it, none left")


def killed(pid: int, victim: str) -> Process | None:
    """The process to be killed, once it has started others or been started."""
    if victim.startswith("rank"):
        return rank_process(pid, int(victim.removeprefix("rank ")))
    if victim == "engine core":
        return next((each for each in descendants(pid) if "EngineCore" in title(each.pid)), None)
    return process(pid) if descendants(pid) else None
