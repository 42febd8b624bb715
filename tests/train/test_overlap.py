"""The next step is sampled from the moment that the engine has its weights: what waits for it, and what is kept."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("safetensors")

from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineUnavailableError
from moe_replay.records import RolloutBatch, Sample, SamplingParams
from moe_replay.train.loop import train
from moe_replay.train.rollout.step_rollout import roll_out
from moe_replay.train.run import Job
from tests.combinations import with_whole_runs

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]
LIMIT_S = 120.0


class Noting(TransformersEngine):
    """Notes when it is asked for samples of a step; those of an evaluation have n = 1."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: defaultdict[int, threading.Event] = defaultdict(threading.Event)  # by weight version
        self.events: list[str] = []

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        self.events.append("generate" if params.n > 1 else "evaluate")
        if params.n > 1:
            self.asked[self.weight_version].set()
        return super().generate(prompts, params)

    def sleep(self, level: int = 1) -> None:
        self.events.append("sleep")
        super().sleep()


@pytest.fixture
def engine(demo_files: Any) -> Iterator[Any]:
    made = Noting.from_pretrained(demo_files.model, dtype="float32", device_map="cpu")
    yield made
    made.close()


def waiting_for_the_next_step(monkeypatch: pytest.MonkeyPatch, engine: Any, *parts: str) -> list[tuple[str, int, bool]]:
    """Have parts of a step wait until the engine is asked for samples of the next one; whether it was, of each."""
    found: list[tuple[str, int, bool]] = []

    def waits(name: str, original: Any) -> Any:
        def part(job: Job, step: int, *rest: Any) -> Any:
            if step < job.config.steps:
                found.append((name, step, engine.asked[step].wait(LIMIT_S)))
            return original(job, step, *rest)

        return part

    for name in parts:
        monkeypatch.setattr(Job, name, waits(name, getattr(Job, name)))
    return found


def test_a_step_is_evaluated_logged_and_saved_while_the_next_one_is_sampled(
    config: Config, metrics_of: Metrics, engine: Any, demo_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the numbers are those of one after the other."""
    settings = {"eval": {"every": 1, "prompts": 3}, "data": {"eval_path": str(demo_files.eval)}}
    with monkeypatch.context() as patched:
        patched.setattr(Job, "begin_rollout", lambda job, step: None)
        serial = train(config("serial", checkpoint={"every": 1, "keep": 3}, **settings))
    waited = waiting_for_the_next_step(monkeypatch, engine, "evaluate", "log", "save")
    overlapped = train(config("overlapped", checkpoint={"every": 1, "keep": 3}, **settings), engine)
    assert waited == [(name, step, True) for step in (1, 2) for name in ("evaluate", "log", "save")]
    assert metrics_of(overlapped) == metrics_of(serial)
    assert positions(overlapped) == positions(serial)
    assert [one["group"] for one in positions(overlapped)] == [4, 8, 12]


def positions(run: Path) -> list[dict[str, int]]:
    """Where in the data each checkpoint of a run is."""
    return [json.loads(path.read_text())["state"]["data"] for path in sorted(run.glob("checkpoints/*/trainer.json"))]


@pytest.mark.parametrize("in_turns", with_whole_runs([False, True], [True]), ids=["", "in turns on the device"])
def test_a_run_that_stops_while_the_next_step_is_sampled_goes_on_as_if_it_had_not(
    config: Config, metrics_of: Metrics, engine: Any, monkeypatch: pytest.MonkeyPatch, in_turns: bool
) -> None:
    turns: dict[str, Any] = {"backend": {"offload": True}, "rollout": {"sleep": True}} if in_turns else {}
    whole = train(config("whole", checkpoint={"every": 0}))
    with monkeypatch.context() as patched:
        waited = waiting_for_the_next_step(patched, engine, "save")
        patched.setattr(Job, "should_stop", lambda job, step: step == 1)
        parts = train(config("parts", checkpoint={"every": 0}, **turns), engine)
    assert waited == [("save", 1, True)]
    assert len(metrics_of(parts)) == 1
    assert not in_turns or engine.events[-2:] == ["generate", "sleep"]
    train(config("parts", checkpoint={"every": 0}, **turns))
    assert metrics_of(parts) == metrics_of(whole)


def test_trainer_and_engine_in_turns_are_serial_where_a_checkpoint_is_due(
    config: Config, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: dict[str, Any] = {"backend": {"offload": True}, "rollout": {"sleep": True}}
    asked: list[bool] = []
    save = Job.save

    def saves(job: Job, step: int) -> None:
        asked.append(engine.asked[step].is_set())
        save(job, step)

    monkeypatch.setattr(Job, "save", saves)
    train(config(steps=2, checkpoint={"every": 1, "at_end": False}, **turns), engine)
    assert asked == [False, False]


def test_samples_that_failed_before_their_server_had_the_weights_again_are_drawn_again() -> None:
    class Begun:
        """Requests of a server that restarted have failed before the trainer came to ask for them."""

        has_begun = True
        engine = SimpleNamespace(  # it has them again
            lacks_weights=lambda: False, wait_for_servers=lambda: False, server_count=lambda: 1
        )

        def next_batch(self, *_: Any) -> RolloutBatch:
            if self.has_begun:
                self.has_begun = False
                raise EngineUnavailableError("no engine of the pool is available")
            return RolloutBatch(headers=[], layers=(), metrics={"reward/mean": 1.0})

    resends: list[int] = []
    devices = SimpleNamespace(put_engine_to_sleep=lambda: None)
    rollouts: Any = Begun()
    batch = roll_out(rollouts, devices, 1, resend_weights=lambda: resends.append(1))  # type: ignore[arg-type]
    assert batch.metrics == {"reward/mean": 1.0}
    assert len(resends) == 2
    rollouts.has_begun, rollouts.next_batch = False, failing
    with pytest.raises(EngineUnavailableError):  # without a cause to try again
        roll_out(rollouts, devices, 1, resend_weights=lambda: None)  # type: ignore[arg-type]


def failing(*_: Any) -> RolloutBatch:
    raise EngineUnavailableError("no engine of the pool is available")
