"""Whose weights sampled: servers that restart, that someone else updates, or that a proxy stands in for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tenacity")
pytest.importorskip("transformers")

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from tenacity import wait_none

from moe_replay.engines.pool import EnginePool
from moe_replay.engines.server.app import build_app
from moe_replay.engines.server.client import RolloutClient
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import AlignmentError, EngineAnswerError, EngineUnavailableError
from moe_replay.records import SamplingParams
from moe_replay.train.loop import train
from moe_replay.train.rollout.groups import LocalGroups
from moe_replay.train.run import Job
from moe_replay.weights.checkpoint import checkpoint_tensors
from tests.combinations import with_thorough, with_whole_runs
from tests.distributed import harness
from tests.engines.serving import serving
from tests.engines.tiny import assert_sampled_from, tiny_model
from tests.faults.restartable import GoingDownInEvaluations, Hanging, Restartable, Waiting
from tests.train.runs import tiny_config, train_on_rank

TOKEN = "secret"
SHORT = SamplingParams(max_tokens=3)
TIMEOUT_S = 20.0  # of what hangs, and of all else: a machine may stall for as long in an update of weights


@pytest.fixture
def served() -> Iterator[Callable[[Callable[[], TransformersEngine]], tuple[Restartable, str]]]:
    """Start a server of an engine: the engine, and the URL."""
    with ExitStack() as stack:

        def start(make: Callable[[], TransformersEngine]) -> tuple[Restartable, str]:
            engine = Restartable(make)
            stack.callback(lambda: engine.close())
            return engine, stack.enter_context(serving(build_app(engine, TOKEN)))

        yield start


def tiny_engine() -> TransformersEngine:
    return TransformersEngine(tiny_model("olmoe"), max_length=64)


def quick_pool(*urls: str, attempts: int = 4) -> EnginePool:
    clients = [RolloutClient(url, token=TOKEN) for url in urls]
    return EnginePool(clients, cooldown_s=0.05, max_backoff_s=0.2, attempts=attempts)


def newer() -> Iterator[tuple[str, Any]]:
    return checkpoint_tensors(tiny_model("olmoe", seed=3))


# ---- whole runs -----------------------------------------------------------------------------------------------------


def lines_of_run(demo_files: Any, output: Path, rollout: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """Metrics of each step of a run that samples from servers, without the clock and what was refused."""
    config = tiny_config(demo_files.model, demo_files.train, output, rollout=rollout, **settings)
    lines = [json.loads(line) for line in (train(config) / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if not key.startswith(("time", "servers/"))} for line in lines]


def evaluated(demo_files: Any) -> dict[str, Any]:
    """Settings of a run that evaluates each step."""
    return {"eval": {"every": 1, "prompts": 3}, "data": {"eval_path": str(demo_files.eval)}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "when",
    with_whole_runs(
        with_thorough(
            ["between sync and rollout", "in the middle of a rollout", "while the step before is logged"],
            ["between sync and rollout"],
        ),
        ["while the step before is logged"],
    ),
)
def test_a_server_that_restarts_changes_nothing(
    when: str, demo_files: Any, tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the weights again before it samples: the metrics are those of a run without a restart."""
    engine, url = served(lambda: TransformersEngine.from_pretrained(demo_files.model))
    disturb = engine.restart_at_the_next_request if when.startswith("in the middle") else engine.restart
    name, before = ("log", 3) if when.endswith("logged") else ("begin_rollout", 4)
    part = getattr(Job, name)

    def disturbed_part(job: Job, step: int, *given: Any) -> None:
        if job.config.name == "disturbed" and step < before:
            disturb()
        part(job, step, *given)

    monkeypatch.setattr(Job, name, disturbed_part)
    rollout = {"engine": "rollout_server", "urls": [url], "token": TOKEN}

    def run(name: str) -> list[dict[str, Any]]:
        return lines_of_run(demo_files, tmp_path / name, rollout, name=name)

    disturbed = run("disturbed")
    assert engine.restarts == 2
    assert all(line["completion/staleness_max"] == 0 for line in disturbed)
    assert disturbed == run("calm")


@pytest.mark.slow
@pytest.mark.whole_runs
@pytest.mark.parametrize("samples", [4, 1], ids=["in a rollout", "in an evaluation"])
def test_a_server_that_hangs_and_restarts_is_sent_the_weights_while_others_sample(
    samples: int, demo_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stalls nobody beyond the timeout, and serves again in the same step."""
    monkeypatch.setattr("moe_replay.train.rollout.groups.STOP_CHECK_S", 0.1)
    begun: Counter[int] = Counter()
    submit = LocalGroups.submit

    def noting(groups: LocalGroups, tasks: Any, **options: Any) -> Any:
        begun.update(task.index for task in tasks)
        return submit(groups, tasks, **options)

    monkeypatch.setattr(LocalGroups, "submit", noting)

    def start() -> TransformersEngine:
        return TransformersEngine.from_pretrained(demo_files.model)

    hanging, waiting = Hanging(start), Waiting(start)
    hanging.in_requests_for, waiting.other = samples, hanging
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(build_app(engine, TOKEN))) for engine in (hanging, waiting)]
        for engine in (hanging, waiting):
            stack.callback(lambda engine=engine: engine.close())
        rollout = {"engine": "rollout_server", "urls": urls, "token": TOKEN, "options": {"timeout": TIMEOUT_S}}
        lines = lines_of_run(demo_files, tmp_path / "run", rollout, steps=2, **evaluated(demo_files))
    assert [line["step"] for line in lines] == [1, 2]
    assert hanging.restarts == 1
    assert begun == Counter({-1: 2 * 3, **dict.fromkeys(range(8), 1)})  # nothing was begun again
    assert all(line["completion/staleness_max"] == 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    with_whole_runs(
        with_thorough(["hangs", "goes down", "goes down for longer than requests are tried again"], ["goes down"]),
        ["hangs"],
    ),
)
def test_a_server_that_is_lost_in_an_evaluation_changes_nothing(
    how: str, demo_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only one: it gets the weights again, and the evaluation goes on, or begins again if its requests failed."""
    if how.startswith("goes down for"):
        monkeypatch.setattr("moe_replay.engines.pool.wait_random_exponential", lambda **_: wait_none())
    else:
        monkeypatch.setattr("moe_replay.train.rollout.groups.STOP_CHECK_S", 0.1)
    kind = Hanging if how == "hangs" else GoingDownInEvaluations
    engine = kind(lambda: TransformersEngine.from_pretrained(demo_files.model))
    settings = {"steps": 2, **evaluated(demo_files)}
    with closing(engine), serving(build_app(engine, TOKEN)) as url:  # type: ignore[arg-type]
        rollout = {"engine": "rollout_server", "urls": [url], "token": TOKEN, "options": {"timeout": TIMEOUT_S}}
        disturbed = lines_of_run(demo_files, tmp_path / "disturbed", rollout, **settings)
        assert engine.restarts == 1
        assert disturbed == lines_of_run(demo_files, tmp_path / "calm", rollout, **settings)
    assert all("eval/reward" in line for line in disturbed)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.whole_runs
def test_all_ranks_send_the_weights_to_a_server_that_is_lost_in_an_evaluation(demo_files: Any, tmp_path: Path) -> None:
    engine = GoingDownInEvaluations(lambda: TransformersEngine.from_pretrained(demo_files.model))
    with closing(engine), serving(build_app(engine, TOKEN)) as url:  # type: ignore[arg-type]
        rollout = {"engine": "rollout_server", "urls": [url], "token": TOKEN}
        settings = {"steps": 2, "rollout": rollout, **evaluated(demo_files)}
        found = []
        for name in ("disturbed", "calm"):
            files = (str(demo_files.model), str(demo_files.train), str(tmp_path / name))
            lines, same = harness.run_ranks(2, train_on_rank, *files, settings)
            assert lines == same
            found.append(
                [{key: line[key] for key in line if not key.startswith(("time", "servers/"))} for line in lines]
            )
    assert engine.restarts == 1
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_server_that_does_not_come_back_in_an_evaluation_is_named(
    demo_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_replay.engines.pool.wait_random_exponential", lambda **_: wait_none())
    engine = GoingDownInEvaluations(lambda: TransformersEngine.from_pretrained(demo_files.model))
    engine.comes_back = False
    with closing(engine), serving(build_app(engine, TOKEN)) as url:  # type: ignore[arg-type]
        rollout = {"engine": "rollout_server", "urls": [url], "token": TOKEN}
        with pytest.raises(EngineUnavailableError, match=f"no engine of the pool.*{url}.*Restart the servers"):
            lines_of_run(demo_files, tmp_path / "run", rollout, **evaluated(demo_files))


@pytest.mark.slow
def test_samples_older_than_the_limit_end_the_run(demo_files: Any, tmp_path: Path) -> None:
    class Lagging(TransformersEngine):
        """Takes the weights under the version and id of the first ones."""

        def update_weights(self, weights: Any, version: int, probe: Any = None, weights_id: str = "") -> None:
            super().update_weights(weights, 0, probe, self.weights_id or weights_id)

    engine = Lagging.from_pretrained(demo_files.model)
    try:
        with pytest.raises(AlignmentError, match="at most 0 steps old"):
            train(tiny_config(demo_files.model, demo_files.train, tmp_path / "run"), engine)
    finally:
        engine.close()


# ---- clients and pools ----------------------------------------------------------------------------------------------


def test_a_restarted_server_is_not_used_until_it_has_the_weights_again(served: Any) -> None:
    (engine, url), (_, other) = served(tiny_engine), served(tiny_engine)
    with quick_pool(url, other) as pool:
        pool.update_weights(newer(), 0, weights_id="run-0-a")  # the version that a server starts with
        assert not pool.lacks_weights()
        engine.restart()
        assert pool.lacks_weights()
        for (sample,) in pool.generate([[i + 1, 5] for i in range(6)], SHORT):
            assert sample.weights_id == "run-0-a"
            assert_sampled_from(tiny_model("olmoe", seed=3), sample)
        pool.update_weights(newer(), 0, weights_id="run-0-a")
        assert not pool.lacks_weights()
        assert engine.weights_id == "run-0-a"


def test_only_servers_without_the_weights_are_sent_them_again(served: Any) -> None:
    (first, url), (second, other) = served(tiny_engine), served(tiny_engine)
    with quick_pool(url, other) as pool:
        pool.update_weights(newer(), 4, weights_id="run-4-a")
        first.restart()
        second._engine.update_weights = None  # a second update would fail
        pool.update_weights(newer(), 4, weights_id="run-4-a")
        assert (first.weight_version, second.weight_version) == (4, 4)


def test_samples_of_weights_that_someone_else_sent_are_refused(served: Any) -> None:
    _, url = served(tiny_engine)
    with quick_pool(url, attempts=2) as pool, RolloutClient(url, token=TOKEN) as stranger:
        pool.update_weights(newer(), 3, weights_id="run-3-a")
        assert pool.generate([[1, 2]], SHORT)[0][0].weights_id == "run-3-a"
        stranger.update_weights(newer(), 3, weights_id="other-3-b")
        with pytest.raises(EngineUnavailableError, match=r"not sent.*run-3-a.*other-3-b|no engine of the pool"):
            pool.generate([[1, 2]], SHORT)


def test_an_aborted_sample_of_the_weights_before_is_not_foreign(served: Any) -> None:
    """New weights abort what is running: it comes back with the id of the weights that it has so far."""
    engine, url = served(tiny_engine)
    with RolloutClient(url, token=TOKEN) as client:
        client.update_weights(newer(), 1, weights_id="run-1-a")
        (sample,) = engine.generate([[1, 2]], SHORT)[0]
        client.update_weights(newer(), 2, weights_id="run-2-b")
        client._ledger.check([sample])


@pytest.mark.parametrize("answer", ["html", "json", "stale info"])
def test_what_answers_without_the_weights_has_not_taken_them(served: Any, answer: str) -> None:
    """A proxy that answers /weights by itself, with 200."""
    engine, url = served(tiny_engine)
    with RolloutClient(url, token=TOKEN) as direct:
        info = direct._call("GET", "/info")

    async def swallow(request: Any) -> Response:
        async for _ in request.stream():
            pass
        if answer == "html":
            return HTMLResponse("<p>It works!</p>")
        return JSONResponse(info if answer == "stale info" else {"status": "ok"})

    async def pass_on(request: Any) -> Response:
        return JSONResponse(info)

    proxy = Starlette(
        routes=[Route("/weights", swallow, methods=["POST"]), Route("/info", pass_on), Route("/health", pass_on)]
    )
    with serving(proxy) as behind, RolloutClient(behind, token=TOKEN) as client:
        with pytest.raises(EngineAnswerError, match=r"/weights|does not have them"):
            client.update_weights(newer(), 1, weights_id="run-1-a")
        with quick_pool(behind, url) as pool:  # the other server has them
            pool.update_weights(newer(), 1, weights_id="run-1-a")
            assert {s.weights_id for (s,) in pool.generate([[i + 1] for i in range(4)], SHORT)} == {"run-1-a"}
            assert not pool.lacks_weights()  # that has lost them: it is not sent them in every step
    assert engine.weights_id == "run-1-a"
