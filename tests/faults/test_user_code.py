"""Rewards and environments that hang, exit or raise anything: an error that names them, within a limit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the trainer's own dependency")

from moe_replay.engines.base import Sampler
from moe_replay.engines.event_loop import LoopThread
from moe_replay.errors import ExitStatus
from moe_replay.train.config.file import to_toml
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.rollout.environments import EpisodeError, run_environment
from moe_replay.train.rollout.groups import LocalGroups
from moe_replay.train.rollout.prompts import Prompt, PromptStream
from moe_replay.train.rollout.rewards import Reward, RewardError, load_reward, score
from moe_replay.train.rollout.rollouts import Rollouts
from moe_replay.utils.plugins import PluginError
from moe_replay.utils.processes import exits_are_failures
from tests.faults.processes import LIMIT_S, ROOT
from tests.train.runs import tiny_config
from tests.train.trajectories import random_trajectory

pytestmark = pytest.mark.slow


class Odd(BaseException):
    """What nobody catches."""


ENDINGS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), Odd("odd"), TimeoutError()]


def never() -> None:
    threading.Event().wait()


def raising(error: BaseException) -> Callable[..., Any]:
    def reward(**_: Any) -> Any:
        raise error

    return reward


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
def test_a_reward_that_ends_in_its_own_way_is_named(error: BaseException) -> None:
    reward = Reward("mine:score", raising(error), timeout_s=600)
    with pytest.raises(RewardError, match=rf"reward 'mine:score' raised {type(error).__name__}.*1 completions"):
        score([reward], ["p"], ["c"], {})


def test_a_reward_that_hangs_is_named() -> None:
    reward = Reward("mine:score", lambda **_: never(), timeout_s=0.05)
    with pytest.raises(RewardError, match=r"'mine:score' did not return within 0\.05 s.*raise reward\.timeout_s"):
        score([reward], ["p"], ["c"], {})


def test_a_reward_in_time_is_as_before() -> None:
    for timeout_s in (600.0, 1e300, float("inf")):
        assert score([Reward("r", lambda **_: [1.0], timeout_s=timeout_s)], ["p"], ["c"], {})["r"].tolist() == [1.0]


def test_the_limit_of_a_configuration_reaches_the_reward() -> None:
    assert TrainConfig().reward.timeout_s == 60
    assert load_reward("format", 0.5, 7.0) == Reward("format", load_reward("format").function, 0.5, 7.0)


# ---- environments ----------------------------------------------------------------------------------------------------


def episode() -> Any:
    return SimpleNamespace(prompt=Prompt(7, "p", (1,), {}))


@pytest.mark.parametrize(
    "error", [e for e in ENDINGS if not isinstance(e, GeneratorExit)], ids=lambda error: type(error).__name__
)
def test_an_environment_that_ends_in_its_own_way_is_named(error: BaseException) -> None:
    async def game(episode: Any) -> None:
        await asyncio.sleep(0)
        raise error

    loop = LoopThread("environments")
    try:
        with pytest.raises(EpisodeError, match=rf"environment .*game raised {type(error).__name__}.*\[sample row 7\]"):
            loop.run(run_environment(game, episode(), 600.0))
        assert loop.ping().wait(timeout=60)
    finally:
        loop.close()


def test_an_environment_that_hangs_is_named() -> None:
    async def game(episode: Any) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(True)
                if len(ended) > 1:  # it ignores the first request to end
                    raise

    ended: list[bool] = []
    with pytest.raises(EpisodeError, match=r"game did not return within 0\.05 s \[sample row 7\]"):
        asyncio.run(run_environment(game, episode(), 0.05))
    assert ended


def test_an_environment_of_a_cancelled_rollout_is_cancelled() -> None:
    async def game(episode: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def cancelled() -> None:
        task = asyncio.ensure_future(run_environment(game, episode(), 600.0))
        await begun.wait()
        task.cancel()
        await task

    begun = asyncio.Event()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


async def blocking(episode: Any) -> None:
    """Blocks the event loop."""
    never()


class Engine(Sampler):
    """Samples nothing worth reading."""

    is_serial = True

    def generate(self, prompts: Any, params: Any) -> Any:
        return [[SimpleNamespace()] * params.n for _ in prompts]


@pytest.mark.parametrize("kind", ["blocking", "exiting"])
def test_rollouts_end_when_an_environment_or_a_reward_does_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop of all rollouts must not be blocked for good, nor end with the exit of a function."""
    monkeypatch.setattr("moe_replay.engines.event_loop.CLOSE_TIMEOUT_S", 0.05)
    environment = f"{__name__}:blocking" if kind == "blocking" else None
    settings = {"environment": environment, "environment_timeout_s": 0.05, "prompts_per_step": 1, "num_generations": 2}
    config = TrainConfig.model_validate({"rollout": settings, "reward": {"workers": 0}})
    stream = PromptStream([Prompt(0, "p", (1,), {})])

    async def run_episode(self: LocalGroups, *arguments: Any) -> Any:
        if self._environment is not None:
            await self._environments.run(run_environment(self._environment, episode(), 600.0))
        return [replace(random_trajectory(0, prompt=1, completion=1), episode=arguments[-1])]

    monkeypatch.setattr(LocalGroups, "_run_episode", run_episode)
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "c")
    rewards = [Reward("exits", raising(SystemExit(1)), timeout_s=600)]
    rollouts = Rollouts(config, Engine(), stream, tokenizer, rewards, 8)  # type: ignore[arg-type]
    expected = r"blocking has blocked the event loop for 0\.05 s" if environment else "reward 'exits' raised SystemExit"
    with pytest.raises((EpisodeError, RewardError), match=expected):
        rollouts.next_batch(0)
    rollouts.close()


# ---- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def score(:", "raised SyntaxError"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
        ("raise RuntimeError('no GPU')", "raised RuntimeError: no GPU"),
        ("import no_such_package", "No module named 'no_such_package'. Correct the module, or install what it imports"),
        ("from json import nothing", "raised ImportError: cannot import name 'nothing' from 'json'"),
        ("len.nothing", "raised AttributeError: 'builtin_function_or_method' object has no attribute 'nothing'. Corr"),
        ("", "has no attribute 'score': expected reward.functions = 'module:name'. The module must be importable"),
        (b"\xff\xfe", "raised SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | bytes, told: str
) -> None:
    (tmp_path / "broken_module.py").write_bytes(source.encode() if isinstance(source, str) else source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_module", raising=False)
    with pytest.raises(PluginError) as caught:
        load_reward("broken_module:score")
    assert str(caught.value).startswith("reward 'broken_module:score' cannot be loaded: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the whole command -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_ends_although_a_thread_of_a_users_function_does_not() -> None:
    """An executor's thread would be waited for at exit."""
    code = textwrap.dedent("""
        import asyncio, threading, sys
        from types import ModuleType
        from moe_replay.cli import main as command
        from moe_replay.train.rollout.environments import EpisodeError

        def train(config, **_):
            async def hang():
                asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
            loop = asyncio.new_event_loop()
            loop.run_until_complete(hang())
            raise EpisodeError("environment mine:game did not return within 1 s")

        sys.modules["moe_replay.train.loop"] = ModuleType("loop")
        sys.modules["moe_replay.train.loop"].train = train
        sys.argv = ["moe-replay", "train"]
        command.EXIT_S = 0.1
        command.main()
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == ExitStatus.FAILED
    assert done.stderr == "error: environment mine:game did not return within 1 s\n"


@pytest.mark.slow
def exits(completions: list[str], **_: Any) -> list[float]:
    """Ends the process with status 0, after processes of its own have."""
    if (child := os.fork()) == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os._exit(0)


async def exits_in_a_turn(episode: Any) -> None:
    """Ends the process with status 0."""
    os._exit(0)


@pytest.mark.parametrize("function", ["exits", "exits_in_a_turn"])
def test_user_code_that_exits_with_0_does_not_end_the_run_with_0(
    function: str, demo_files: Any, tmp_path: Path
) -> None:
    place, recipe = f"{__name__}:{function}", tmp_path / "recipe.toml"
    changes = {"reward": {"functions": [place]}} if function == "exits" else {"rollout": {"environment": place}}
    recipe.write_text(to_toml(tiny_config(demo_files.model, demo_files.train, tmp_path / "run", **changes)))
    command = [sys.executable, "-m", "moe_replay.cli.main", "train", str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert done.returncode == 3, done.stderr
    assert f"error: the run was ended by os._exit(0), called by {function} in {__file__}" in done.stderr


def test_os_exit_is_itself_again_after_a_run() -> None:
    before = os._exit
    with pytest.raises(KeyError), exits_are_failures():
        assert os._exit is not before
        raise KeyError
    assert os._exit is before


def test_a_reward_that_keeps_the_interpreters_lock_ends_the_process_and_is_named() -> None:
    code = textwrap.dedent("""
        import faulthandler, re
        from moe_replay.train.rollout.rewards import Reward, score

        start = faulthandler.dump_traceback_later

        def started(seconds, **options):
            print(seconds, flush=True)
            start(seconds, **options)
            started.options = options

        def backtracking(completions, **_):
            if "b" in completions[0]:
                start(0.1, **started.options)  # the seconds pass while it hangs, however long it took to get here
            return [float(bool(re.match("(a+)+$", text))) for text in completions]

        faulthandler.dump_traceback_later = started
        print(score([Reward("quick", backtracking, timeout_s=600)], ["p"], ["aaa"], {}), flush=True)
        score([Reward("mine", backtracking, timeout_s=900)], ["p"], ["a" * 60 + "b"], {})
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "660.0\n{'quick': array([1.])}\n960.0\n"
    assert done.returncode == 1
    assert "in backtracking" in done.stderr


@pytest.mark.slow
def test_the_watch_ends_with_the_wait() -> None:
    """What hangs in Python alone is an error, after which the process lives on."""
    code = textwrap.dedent("""
        import faulthandler, threading
        from moe_replay.train.rollout.rewards import Reward, RewardError, score

        def noting(name):
            function = getattr(faulthandler, name)

            def noted(*given, **options):
                function(*given, **options)
                print(name, flush=True)

            return noted

        for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
            setattr(faulthandler, name, noting(name))
        try:
            score([Reward("mine", lambda **_: threading.Event().wait(), timeout_s=0.1)], ["p"], ["c"], {})
        except RewardError as error:
            print(error, flush=True)
        print("alive", flush=True)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    started, cancelled, error, alive = done.stdout.splitlines()
    assert (started, cancelled) == ("dump_traceback_later", "cancel_dump_traceback_later")
    assert error.startswith("reward 'mine' did not return within 0.1 s")
    assert (done.returncode, alive) == (0, "alive")
