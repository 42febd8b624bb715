"""Rewards in processes: the scores of this process, and functions that hang, exit or raise cost one sample at most."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pydantic", reason="the trainer's own dependency")

from moe_replay.engines.event_loop import LoopThread
from moe_replay.train.config.sections import RewardConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.rollout.prompts import Prompt
from moe_replay.train.rollout.reward_pool import (
    InProcess,
    RewardPool,
    Samples,
    Scores,
    check_columns,
    open_scorer,
)
from moe_replay.train.rollout.reward_worker import RewardWireError
from moe_replay.train.rollout.rewards import RewardError, load_reward
from tests.faults.processes import descendants, process, start_python, wait_for_line, wait_until_gone
from tests.train.reward_functions import COLUMN, HANGING_FOLDER

pytestmark = pytest.mark.slow

HERE = "tests.train.reward_functions"
HANGING = "a" * 60 + "b"
LIMIT_S = 600.0  # for a sample, in the loop's time: see `pool`


def samples(*completions: str, row: int = 7, **columns: Any) -> Samples:
    count = len(completions)
    return Samples(
        row, range(count), ["p"] * count, list(completions), {name: [value] * count for name, value in columns.items()}
    )


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("scoring")
    yield thread
    thread.close()


@pytest.fixture
def pool(loop: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardPool]]:
    """Starts pools. Time passes in the loop as soon as every process that is asked for something hangs in a function.

    Only what hangs reaches its limit then, at once, and what is scored does not, however busy the machine is.
    """
    opened: list[RewardPool] = []
    passed_s = 0.0
    monkeypatch.setenv(HANGING_FOLDER, str(tmp_path))
    monkeypatch.setattr(loop.loop, "time", lambda: time.monotonic() + passed_s)

    def start(*names: str, workers: int = 1, on_timeout: Any = None) -> RewardPool:
        rewards = [load_reward(_path(name), 1.0, LIMIT_S) for name in names]
        opened.append(RewardPool(rewards, workers, on_timeout))
        return opened[-1]

    def let_time_pass() -> None:
        nonlocal passed_s
        asked = [one.process.pid for used in opened for one in used._started if one.alive and one not in used._idle]
        if asked and all((tmp_path / str(pid)).exists() for pid in asked):
            passed_s += 100 * LIMIT_S
        loop.loop.call_later(0.02, let_time_pass)

    loop.loop.call_soon_threadsafe(let_time_pass)
    yield start
    for one in opened:
        pids = one.pids
        one.close()
        assert wait_until_gone(map(process, pids)) == []


def _path(name: str) -> str:
    if name in ("accuracy", "format", "math_verify"):
        return name
    return f"verl:{HERE}:{name}" if name == "compute_score" else f"{HERE}:{name}"


def listed(scores: Scores) -> list[float | None]:
    (values,) = scores.values()
    return [None if np.isnan(value) else value for value in values.tolist()]


def test_a_function_that_closes_the_connection_is_named(loop: LoopThread, pool: Callable[..., RewardPool]) -> None:
    with pytest.raises(RewardError, match="closing_descriptors' closed the connection of its process, a file descr"):
        loop.run(pool("closing_descriptors").score(samples("a")))


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_the_scores_are_those_of_this_process(loop: LoopThread, pool: Callable[..., RewardPool]) -> None:
    pytest.importorskip("math_verify", reason="needs math-verify")
    names = ["accuracy", "format", "lengths", "ranks", "waiting", "compute_score"]
    processes = pool(*names, workers=2)
    threads = InProcess([load_reward(_path(name)) for name in names])
    group = samples("$7$", "<think>so</think> 7", "", "8", solution="7", ground_truth="8", level=3)
    found, expected = (loop.run(one.score(group)) for one in (processes, threads))
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert 1 <= len(processes.pids) <= 2


def test_values_that_json_does_not_have_arrive(loop: LoopThread, pool: Callable[..., RewardPool]) -> None:
    tokenizer = type("Tokenizer", (), {"decode": staticmethod(lambda ids, **_: "c")})
    group = Samples.of(Prompt(0, "p", (1,), {"column": COLUMN}), [np.array([7, 8], np.int32)] * 2, tokenizer)
    assert listed(loop.run(pool("kinds").score(group))) == [1.0, 1.0]


def test_a_column_that_cannot_be_sent_is_named_before_the_run() -> None:
    prompts = [Prompt(0, "p", (1,), {"fine": 1}), Prompt(1, "p", (1,), {"fine": 1, "image": object()})]
    with pytest.raises(RewardWireError, match=r"column 'image'.*\[sample row 1\].*found object.*reward\.workers = 0"):
        check_columns(prompts)
    check_columns(prompts[:1])


def test_processes_are_used_again(loop: LoopThread, pool: Callable[..., RewardPool]) -> None:
    used = pool("process_ids", workers=3)
    loop.run(used.start())
    found = [listed(loop.run(used.score(samples("a", "b")))) for _ in range(3)]
    assert found == [[float(used.pids[0])] * 2] * 3
    assert used.pids[0] != os.getpid()


def test_the_config_says_where_functions_run() -> None:
    rewards = [load_reward("format")]
    assert isinstance(open_scorer(RewardConfig(), rewards), RewardPool)
    assert isinstance(open_scorer(RewardConfig(workers=0), rewards), InProcess)
    with pytest.raises(ValueError, match=r"reward\.on_timeout: 'unscored' needs worker processes"):
        TrainConfig.model_validate({"reward": {"workers": 0, "on_timeout": "unscored"}})


# ---- functions that take too long ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sample_that_hangs_in_c_code_is_unscored(
    loop: LoopThread, pool: Callable[..., RewardPool], caplog: pytest.LogCaptureFixture
) -> None:
    used = pool("compute_score", on_timeout="unscored")
    loop.run(used.start())
    (first,) = used.pids
    with caplog.at_level(logging.WARNING):
        group = samples("x", HANGING, "y", HANGING, "x", ground_truth="x")
        assert listed(loop.run(used.score(group))) == [1.0, None, 0.0, None, 1.0]
    assert used.timeouts == 2
    assert "sample 1 of row 7: reward 'verl:tests.train.reward_functions:compute_score' did not return" in caplog.text
    assert wait_until_gone([process(first)]) == []
    assert listed(loop.run(used.score(samples("x", ground_truth="x")))) == [1.0]


@pytest.mark.slow
@pytest.mark.whole_runs
def test_a_sample_that_hangs_is_named(loop: LoopThread, pool: Callable[..., RewardPool]) -> None:
    for name, limit_s in (("compute_score", 600), ("ranks", 1800)):
        with pytest.raises(
            RewardError, match=rf"{name}' did not return within {limit_s} s \[sample 2 of row 7\].*'aaaa"
        ):
            loop.run(pool(name, workers=2).score(samples("x", "yy", HANGING, ground_truth="x")))


@pytest.mark.slow
def test_the_others_are_scored_as_one_group(loop: LoopThread, pool: Callable[..., RewardPool]) -> None:
    used = pool("ranks", workers=3, on_timeout="unscored")
    assert listed(loop.run(used.score(samples("xxx", "yy", HANGING, "z")))) == [2.0, 1.0, None, 0.0]
    assert used.timeouts == 1


@pytest.mark.slow
def test_a_group_that_hangs_only_together(loop: LoopThread, pool: Callable[..., RewardPool]) -> None:
    used = pool("together_only", workers=2, on_timeout="unscored")
    assert listed(loop.run(used.score(samples("x", "y")))) == [None, None]
    with pytest.raises(RewardError, match=r"did not return within 1200 s \[sample 0, 1 of row 7\]"):
        loop.run(pool("together_only", workers=2).score(samples("x", "y")))


@pytest.mark.slow
def test_answers_that_math_verify_cannot_compare_do_not_end_a_run(
    loop: LoopThread, pool: Callable[..., RewardPool]
) -> None:
    pytest.importorskip("math_verify", reason="needs math-verify")
    used = pool("math_verify")
    group = samples("$7$", "$9^{9^{9^{9^{9}}}}$", "$7$", solution="7")
    right, monstrous, again = listed(loop.run(used.score(group)))
    assert (right, again) == (1.0, 1.0)
    assert not monstrous


# ---- functions that raise or exit ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endings() -> Iterator[tuple[LoopThread, RewardPool]]:
    thread = LoopThread("endings")
    used = RewardPool([load_reward(f"{HERE}:ending", 1.0, 60.0)], 1)
    yield thread, used
    thread.close()
    used.close()


@pytest.mark.parametrize(
    "kind", ["SystemExit", "KeyboardInterrupt", "CancelledError", "GeneratorExit", "Odd", "KeyError"]
)
def test_what_a_function_raises_is_named(kind: str, endings: tuple[LoopThread, RewardPool]) -> None:
    loop, used = endings
    with pytest.raises(RewardError, match=rf"ending' raised {kind}.*\[sample row 7\].*1 completions") as caught:
        loop.run(used.score(samples(kind)))
    assert "reward_functions.py" in "".join(getattr(caught.value.__cause__, "__notes__", []))
    assert len(used.pids) == 1


def test_what_a_function_returns_is_checked(endings: tuple[LoopThread, RewardPool]) -> None:
    loop, used = endings
    with pytest.raises(RewardError, match=r"one value per completion \[sample row 7\].*found list of 3"):
        loop.run(used.score(samples("many", "more")))


@pytest.mark.parametrize(("kind", "told"), [("exit", "exited with 3"), ("kill", "ended its process by SIGKILL")])
def test_a_function_that_ends_its_process_is_named(
    kind: str, told: str, endings: tuple[LoopThread, RewardPool]
) -> None:
    loop, used = endings
    with pytest.raises(RewardError, match=rf"ending' {told} \[sample 0 of row 7\]"):
        loop.run(used.score(samples(kind)))
    with pytest.raises(RewardError, match="raised KeyError"):
        loop.run(used.score(samples("KeyError")))


def test_an_idle_process_that_was_killed_costs_nothing(loop: LoopThread, pool: Callable[..., RewardPool]) -> None:
    used = pool("lengths")
    loop.run(used.start())
    (pid,) = used.pids
    os.kill(pid, 9)
    assert wait_until_gone([process(pid)]) == []
    assert listed(loop.run(used.score(samples("abc")))) == [3.0]


def test_a_module_that_cannot_be_imported_in_a_process(
    loop: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("import os, sys\nscore = len\nif 'pytest' not in sys.modules: os._exit(4)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    used = RewardPool([load_reward("only_here:score")], 1)
    with pytest.raises(RewardError, match=r"exited with 4 while it imported the functions.*reward\.workers = 0"):
        loop.run(used.score(samples("c")))
    used.close()
    sys.modules.pop("only_here")


@pytest.mark.slow
def test_processes_and_what_they_have_started_end() -> None:
    """What a function has started ends with a sample that is given up, its process with a trainer that is killed."""
    code = textwrap.dedent(f"""
        import asyncio, sys
        from moe_replay.train.rollout.rewards import load_reward
        from moe_replay.train.rollout.reward_pool import RewardPool, Samples

        for limit_s in sys.stdin:
            pool = RewardPool([load_reward("{HERE}:ending", 1.0, float(limit_s))], 1, "unscored")
            asyncio.run(pool.score(Samples(0, [0], ["p"], ["child"], {{}})))
            print("scored", flush=True)
    """)
    with start_python(code, stdin=subprocess.PIPE) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None

        def told(limit_s: float) -> str:
            print(limit_s, file=trainer.stdin, flush=True)
            return trainer.stdout.readline()

        limit_s = 1.0
        while (line := told(limit_s)) == "scored\n":  # it was given up before it had started anything
            limit_s *= 4
        first = process(int(line))
        wait_for_line(trainer.stdout, "scored")
        assert wait_until_gone([first]) == []
        second = process(int(told(600.0)))
        (worker,) = [one for one in descendants(trainer.pid) if "reward_worker" in _title(one.pid)]
        trainer.kill()
        assert wait_until_gone([worker]) == []
        os.kill(second.pid, 9)


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
