"""Runs whose samples come from servers: one that dies in mid-run changes nothing, nor do all where others follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

from tenacity import wait_none

from moe_replay.engines.server.app import build_app
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineUnavailableError
from moe_replay.train.learn.learner import Learner
from moe_replay.train.loop import train
from moe_replay.train.rollout.rollouts import Evaluation
from moe_replay.train.rollout.step_rollout import evaluate, roll_out
from moe_replay.train.run import Job
from moe_replay.train.setup.engines import StartedEngines
from tests.engines.forked_engines import forked_engines
from tests.engines.serving import serving

__all__ = ["forked_engines"]  # a fixture

TOKEN = "secret"


class Servers:
    """Two servers of the same model; `kill` ends the first, in the middle of what it does."""

    def __init__(self, folder: Path) -> None:
        self._resources = [ExitStack(), ExitStack()]
        self.urls = [self._start(folder, stack) for stack in self._resources]

    @staticmethod
    def _start(folder: Path, stack: ExitStack) -> str:
        engine = TransformersEngine.from_pretrained(folder)
        stack.callback(engine.close)
        return stack.enter_context(serving(build_app(engine, TOKEN)))

    def kill(self) -> None:
        self._resources[0].close()

    def close(self) -> None:
        for stack in self._resources:
            stack.close()


@pytest.fixture
def servers(demo_files: Any) -> Iterator[Servers]:
    started = Servers(demo_files.model)
    yield started
    started.close()


@pytest.mark.whole_runs
def test_a_server_that_dies_in_mid_run_loses_and_doubles_nothing(
    config: Callable[..., Any],
    metrics_of: Callable[[Path], list[dict]],
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored = count(1)

    def killing(completions: list[str], **_: Any) -> list[float]:
        if next(scored) == 6:  # in the middle of the second step
            servers.kill()
        return [float(len(completion)) for completion in completions]

    def peaceful(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    monkeypatch.setattr("tests.train.runs.killing", killing, raising=False)
    monkeypatch.setattr("tests.train.runs.peaceful", peaceful, raising=False)
    served = {"engine": "rollout_server", "urls": servers.urls, "token": TOKEN}
    undisturbed = metrics_of(train(config("calm", rollout=served, reward={"functions": ["tests.train.runs:peaceful"]})))
    disturbed = metrics_of(train(config("storm", rollout=served, reward={"functions": ["tests.train.runs:killing"]})))
    names = [name for name in undisturbed[0] if not name.startswith(("reward/tests", "servers/"))]
    assert [[line[name] for name in names] for line in disturbed] == [
        [line[name] for name in names] for line in undisturbed
    ]


class Cluster:
    """An `EngineStarter` that replaces lost servers, and notices only after it was asked for the list a few times."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stacks: list[ExitStack] = []
        self._listed: list[str] = []
        self._unnoticed: int | None = None
        self.started = 0

    def start(self, engine: str, request: Any) -> StartedEngines:
        self._listed = [self._server() for _ in range(2)]
        return StartedEngines(tuple(self._listed), TOKEN, self.urls)

    def _server(self) -> str:
        self._stacks.append(ExitStack())
        self.started += 1
        return Servers._start(self._folder, self._stacks[-1])

    def lose_all(self) -> None:
        self.close()
        self._unnoticed = 2

    def urls(self) -> list[str]:
        if self._unnoticed is not None:
            self._unnoticed -= 1
            if self._unnoticed < 0:
                self._listed, self._unnoticed = [self._server()], None
        return self._listed

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()
        self._stacks = []


@pytest.mark.whole_runs
def test_all_servers_lost_at_once_while_sampling_training_and_evaluating(
    config: Callable[..., Any],
    metrics_of: Callable[[Path], list[dict]],
    demo_files: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others take their place, are sent the weights, and the numbers are those of an undisturbed run."""
    monkeypatch.setattr("moe_replay.engines.pool.wait_random_exponential", lambda **_: wait_none())
    plain = {"steps": 4, "checkpoint": {"every": 0}, "cluster": {"launcher": "ray", "engines": 2}}
    plain |= {"eval": {"every": 2, "prompts": 3}, "data": {"eval_path": str(demo_files.eval)}}
    found = {}
    for name in ("calm", "storm"):
        with closing(Cluster(demo_files.model)) as cluster:
            with monkeypatch.context() as changed:
                if name == "storm":
                    lose_before(changed, cluster, Job, "rollout", call=2)
                    lose_before(changed, cluster, Learner, "update", call=3)
                    lose_before(changed, cluster, Evaluation, "metrics", call=1)
                found[name] = metrics_of(train(config(name, **plain), starter=cluster))
            assert cluster.started == (2 if name == "calm" else 5)
    assert samples_of(found["storm"]) == samples_of(found["calm"])


def lose_before(changed: pytest.MonkeyPatch, cluster: Cluster, owner: Any, name: str, call: int) -> None:
    method, calls = getattr(owner, name), count(1)

    def losing(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            cluster.lose_all()
        return method(*arguments, **named)

    changed.setattr(owner, name, losing)


def samples_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the metrics say of the samples; last bits of log-probs depend on the batches of the servers."""
    kept = ("step", "reward/", "completion/", "data/", "eval/")
    return [{name: value for name, value in line.items() if name.startswith(kept)} for line in lines]


@pytest.mark.parametrize("what", ["rollout", "evaluation"])
@pytest.mark.parametrize(("lacks", "begun", "tries"), [(True, False, 4), (False, True, 2), (False, False, 1)])
def test_groups_that_failed_without_servers_are_begun_again(what: str, lacks: bool, begun: bool, tries: int) -> None:
    """As long as servers have to be sent the weights; those of before an update once."""
    made = []

    def fail(*_: Any) -> None:
        made.append(work.has_begun)
        work.has_begun = False
        raise EngineUnavailableError("no engine of the pool is available")

    unused: Any = None
    withdrawn: list[bool] = []
    engine = SimpleNamespace(lacks_weights=lambda: lacks, wait_for_servers=lambda: False, server_count=lambda: 1)
    work = SimpleNamespace(has_begun=begun, next_batch=fail, metrics=fail, engine=engine)
    work.evaluation = lambda *_: work
    work.withdraw = lambda: withdrawn.append(True)
    rollouts: Any = work
    with pytest.raises(EngineUnavailableError):
        if what == "rollout":
            roll_out(rollouts, unused, 0, resend_weights=lambda: None)
        else:
            evaluate(rollouts, [], 0.0, resend_weights=lambda: None)
    assert made == [begun, *[False] * (tries - 1)]
    assert bool(withdrawn) == (what == "evaluation")


@pytest.mark.engine
@pytest.mark.usefixtures("forked_engines")
def test_engines_that_the_trainer_starts_sample_as_one_in_its_process(
    config: Callable[..., Any], metrics_of: Callable[[Path], list[dict]]
) -> None:
    inside = metrics_of(train(config("inside", steps=2, checkpoint={"every": 0})))
    two = {"rollout": {"engines_per_node": 2, "sleep": True}, "backend": {"offload": True}}
    outside = metrics_of(train(config("outside", steps=2, checkpoint={"every": 0}, **two)))
    for one, other in zip(inside, outside, strict=True):
        for name in ("reward/mean", "completion/length_mean", "loss/entropy", "routing/agreement"):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
