"""Runs whose samples come from servers: one that dies in mid-run changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

from moe_replay.rollout.server.app import build_app
from moe_replay.rollout.transformers import TransformersEngine
from moe_replay.train.loop import train
from tests.rollout.forked_engines import forked_engines
from tests.rollout.serving import serving

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
    served = {"engine": "vllm_server", "urls": servers.urls, "token": TOKEN}
    undisturbed = metrics_of(train(config("calm", rollout=served, reward={"functions": ["tests.train.runs:peaceful"]})))
    disturbed = metrics_of(train(config("storm", rollout=served, reward={"functions": ["tests.train.runs:killing"]})))
    names = [name for name in undisturbed[0] if not name.startswith("reward/tests")]
    assert [[line[name] for name in names] for line in disturbed] == [
        [line[name] for name in names] for line in undisturbed
    ]


@pytest.mark.engine
@pytest.mark.usefixtures("forked_engines")
def test_engines_that_the_trainer_starts_sample_as_one_in_its_process(
    config: Callable[..., Any], metrics_of: Callable[[Path], list[dict]]
) -> None:
    inside = metrics_of(train(config("inside", steps=2, checkpoint={"every": 0})))
    two = {"rollout": {"engines_per_node": 2, "sleep": True}, "backend": {"offload": True}}
    two["weights"] = {"delta": True}  # the first update has all weights, later ones what has changed
    outside = metrics_of(train(config("outside", steps=2, checkpoint={"every": 0}, **two)))
    for one, other in zip(inside, outside, strict=True):
        for name in ("reward/mean", "completion/length_mean", "loss/entropy", "routing/agreement"):
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
