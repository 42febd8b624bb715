"""Rollout workers: a run has the numbers of one worker, whichever process samples a group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers")

from moe_replay.engines.server.app import build_app
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.train.loop import train
from tests.distributed import harness
from tests.engines.serving import serving
from tests.train.runs import train_on_rank

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
TOKEN = "secret"
Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]


async def second_turn(episode: Any) -> None:
    """Let the model go on once, after a few tokens that it did not sample; one worker ends in the tenth episode."""
    folder = os.environ.get("MOE_REPLAY_TEST_KILL")
    if folder is not None:
        played = len(list(Path(folder).iterdir()))
        (Path(folder) / f"{os.getpid()}-{played}").touch()
        if played == 10:
            os.kill(os.getpid(), signal.SIGKILL)
    if episode.can_continue:
        episode.observe("7+1=")
        await episode.generate()


@pytest.fixture(scope="module")
def url(demo_files: Any) -> Iterator[str]:
    """The address of a server whose engine samples alike in every run, since each sends its weights first."""
    with ExitStack() as stack:
        engine = TransformersEngine.from_pretrained(demo_files.model)
        stack.callback(engine.close)
        yield stack.enter_context(serving(build_app(engine, TOKEN)))


def served(url: str, **rollout: Any) -> dict[str, Any]:
    settings = {"engine": "rollout_server", "urls": [url], "token": TOKEN, **rollout}
    return {"rollout": settings, "log": {"completions": True, "traces": 2}, "checkpoint": {"every": 0}, "steps": 2}


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Process ids of all workers that were started."""
    from moe_replay.train.workers import pool

    found: list[int] = []

    class Noted(pool._Worker):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            found.append(self.process.pid)

    monkeypatch.setattr(pool, "_Worker", Noted)
    return found


def files_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.glob("*/step-*")) if path.is_file()}


@pytest.mark.whole_runs
def test_two_workers_sample_what_one_does_ahead_of_training(
    config: Config, metrics_of: Metrics, url: str, started: list[int], demo_files: Any
) -> None:
    settings = {"eval": {"every": 1, "prompts": 3}, "data": {"eval_path": str(demo_files.eval)}}
    rollout = {"max_staleness": 1, "partial_rollout": False, "top_k": 5}
    one = train(config("one", **served(url, **rollout), **settings))
    assert not started
    two = train(config("two", **served(url, workers=2, **rollout), **settings))
    assert metrics_of(two) == metrics_of(one)
    assert {"eval/reward", "sampling/kept_fraction"} <= metrics_of(two)[0].keys()
    assert len(files_of(two)) == 4
    assert files_of(two) == files_of(one)
    assert len(started) == 2
    assert not alive(started)


@pytest.mark.whole_runs
def test_two_ranks_train_on_what_two_workers_sample(demo_files: Any, tmp_path: Path, url: str) -> None:
    """Also where an episode is several samples."""
    runs = []
    rollout = {"environment": "tests.train.test_rewriting:condensing", "max_turns": 3, "max_tokens": 4}
    for workers in (1, 2):
        run = tmp_path / str(workers)
        arguments = (str(demo_files.model), str(demo_files.train), str(run), served(url, workers=workers, **rollout))
        lines, same = harness.run_ranks(2, train_on_rank, *arguments)
        assert lines == same
        assert [line["completion/samples_mean"] for line in lines] == [2, 2]
        runs.append(([{k: v for k, v in line.items() if not k.startswith("time")} for line in lines], files_of(run)))
    assert len(runs[0][1]) == 4
    assert runs[0] == runs[1]


@pytest.mark.whole_runs
def test_the_groups_of_a_worker_that_is_killed_are_sampled_by_the_other(
    config: Config,
    metrics_of: Metrics,
    url: str,
    started: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rollout = {"environment": "tests.train.test_workers:second_turn", "max_turns": 2, "max_tokens": 6}
    one = train(config("one", **served(url, **rollout)))
    (tmp_path / "played").mkdir()
    monkeypatch.setenv("MOE_REPLAY_TEST_KILL", str(tmp_path / "played"))
    two = train(config("two", **served(url, workers=2, **rollout)))
    (warning,) = [record.message for record in caplog.records if "reassigning its" in record.message]
    assert "was ended by SIGKILL" in warning
    assert metrics_of(two) == metrics_of(one)
    assert files_of(two) == files_of(one)
    assert not alive(started)


@pytest.mark.whole_runs
def test_an_error_of_a_group_ends_the_run_and_its_workers(config: Config, url: str, started: list[int]) -> None:
    from moe_replay.train.rollout.environments import EpisodeError

    broken = {"environment": "tests.train.test_loop:failing", "workers": 2}
    with pytest.raises(EpisodeError, match="environment failing raised ZeroDivisionError") as error:
        train(config(**served(url, **broken)))
    assert "rollout worker" in "".join(error.value.__notes__)
    assert len(started) == 2
    assert not alive(started)
