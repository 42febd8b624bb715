"""Ctrl-C, SIGTERM and SIGHUP: the first one saves, the second one ends whatever hangs. vLLM: test_vllm_processes.py."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from moe_replay.errors import ExitStatus
from moe_replay.train.config.file import to_toml
from tests.faults.forked import fork_command, fork_python
from tests.faults.processes import LIMIT_S, start_command, wait_for_line
from tests.train.runs import tiny_config

pytestmark = pytest.mark.slow


def recipe(demo_files: Any, folder: Path, **overrides: Any) -> str:
    config = tiny_config(demo_files.model, demo_files.train, folder / "run", **overrides)
    path = folder / "recipe.toml"
    path.write_text(to_toml(config))
    return str(path)


@pytest.mark.whole_runs
def test_a_signal_saves_the_step_and_the_run_resumes(demo_files: Any, tmp_path: Path) -> None:
    """With a status of its own; the run goes on where it was."""
    made = recipe(demo_files, tmp_path, steps=1000, replay={"score_native_every": 0}, checkpoint={"every": 0})
    reached = 0
    for number, start in ((signal.SIGHUP, start_command), (signal.SIGINT, fork_command)):
        with start("train", made) as run:
            assert run.stdout is not None
            wait_for_line(run.stdout, f"step {reached + 1}/1000")
            run.send_signal(number)
            rest = run.stdout.read()
            assert run.wait(LIMIT_S) == ExitStatus.INTERRUPTED == 75, rest
        (checkpoint,) = [path for path in (tmp_path / "run/checkpoints").iterdir() if path.name > f"step-{reached:08d}"]
        reached = int(checkpoint.name.removeprefix("step-"))
        assert 0 < reached < 1000
        assert "finishing the step, then saving; repeat to exit now" in rest
        assert "to resume: moe-replay train" in rest


SLOW_SOURCES = """
import sys, time
from moe_replay.cli.main import main
from moe_replay.train.setup import sources

def find_sources(config, status):
    print("preparing", flush=True)
    time.sleep(3600)

sources.find_sources = find_sources
main(["train", "--output", sys.argv[1]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_warm_start_or_a_download(tmp_path: Path, number: signal.Signals) -> None:
    """Both come before the first step and take minutes: there is nothing to finish."""
    with fork_python(SLOW_SOURCES, str(tmp_path / "run")) as run:
        wait_for_line(run.stdout, "preparing")
        run.send_signal(number)
        assert run.wait(LIMIT_S) == ExitStatus.INTERRUPTED
        assert "interrupted before the first step" in run.stdout.read()


@pytest.mark.parametrize(
    "settings",
    [
        {"reward": {"functions": ["tests.faults.hanging:reward"]}},
        {"rollout": {"environment": "tests.faults.hanging:environment"}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_second_signal_ends_a_run_that_hangs(demo_files: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    made = recipe(demo_files, tmp_path, **settings)
    with fork_command("train", made) as run:
        wait_for_line(run.stdout, "hanging")
        run.send_signal(signal.SIGINT)
        run.send_signal(signal.SIGTERM)
        assert run.wait(LIMIT_S) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
        assert "ended without saving" in run.stdout.read()


# Locks a mutex twice: a wait that signals do not interrupt, as in a collective with a rank that is gone. Threads do not
# take turns, so the other one says "ready" when the main thread has left Python.
DEADLOCK = """
import ctypes, sys, threading
from moe_replay.train.output.interruption import InterruptHandler

def tell():
    leaving.wait()
    print("ready", flush=True)

sys.setswitchinterval(1000)
leaving = threading.Event()
threading.Thread(target=tell, daemon=True).start()
with InterruptHandler(ends_process=sys.argv[1] == "command"):
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(128)
    lock(mutex)
    leaving.set()
    lock(mutex)
"""


@pytest.mark.parametrize(("where", "signals"), [("command", 2), ("program", 3)])
def test_a_main_thread_that_never_returns_to_python_is_ended(where: str, signals: int) -> None:
    with fork_python(DEADLOCK, where) as stuck:
        wait_for_line(stuck.stdout, "ready")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[:signals]:
            assert stuck.poll() is None
            stuck.send_signal(number)
        status = stuck.wait(LIMIT_S)
        assert status > 128 or status < 0  # its own end, or that of the last signal


FORKED = """
import os, signal, time
from moe_replay.train.output.interruption import InterruptHandler

with InterruptHandler(ends_process=True) as interruption:
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b".")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(child, number)
        time.sleep(0.2)
    os.write(done[1], b".")
    os.waitpid(child, 0)
    print("not mine", interruption._received, flush=True)
"""


def test_signals_of_a_forked_child_are_not_the_parents() -> None:
    """A child has the handlers of its parent, until it sets its own."""
    with fork_python(FORKED) as done:
        told, _ = done.communicate(LIMIT_S)
    assert (done.returncode, told.splitlines()[-1]) == (0, "not mine False")


IGNORED = """
import os, signal
from moe_replay.train.output.interruption import InterruptHandler

signal.signal(signal.SIGHUP, signal.SIG_IGN)
with InterruptHandler(ends_process=True) as interruption:
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGTERM)
    print("noted", interruption._received)
"""


def test_what_nohup_ignores_stays_ignored() -> None:
    with fork_python(IGNORED) as done:
        told, _ = done.communicate(LIMIT_S)
    assert (done.returncode, told.splitlines()[-1]) == (0, "noted True")


def test_handlers_and_the_wakeup_descriptor_are_restored() -> None:
    from moe_replay.train.output.interruption import InterruptHandler

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with InterruptHandler() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interruption._received
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert signal.set_wakeup_fd(-1) == -1
