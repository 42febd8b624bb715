"""Runs with two servers, one of which lies: what is noticed, and what the run does."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tenacity")
pytest.importorskip("transformers")

from moe_replay.records import Sample
from moe_replay.report.record import read_run
from moe_replay.report.run_report import warnings
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.learn.server_checks import ServerCheckError
from moe_replay.train.loop import train
from moe_replay.verification.metrics import MetricAccumulator
from tests.faults.lying import TOKEN, Samples, lying_and_honest
from tests.train.runs import tiny_config

LONGER = {"max_tokens": 24}  # enough tokens of each server for a verdict: none ends its samples earlier


def each(change: Any) -> Samples:
    return lambda samples: [change(sample) for sample in samples]


class LyingRun:
    """A run of two steps with two servers; its metrics, log and folder."""

    def __init__(self, demo_files: Any, output: Path, change: Samples, **settings: Any) -> None:
        with lying_and_honest(demo_files.model, change) as (self.bad, self.good):
            rollout = {"engine": "rollout_server", "urls": [self.bad, self.good], "token": TOKEN}
            rollout |= settings.pop("rollout", {})
            made = tiny_config(demo_files.model, demo_files.train, output, steps=2, rollout=rollout, **settings)
            self.folder = train(made)
        self.lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        self.log = (self.folder / "log.txt").read_text()

    def total(self, name: str) -> float:
        return sum(line.get(name, 0.0) for line in self.lines)

    def of_liar(self, name: str) -> str:
        return f"servers/{self.bad.removeprefix('http://')}/{name}"


@pytest.fixture(autouse=True)
def log_level() -> Any:
    logger = logging.getLogger("moe_replay")
    level = logger.level
    yield
    logger.setLevel(level)


# ---- refused answers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_samples_of_other_weights_are_refused_counted_and_reported(
    demo_files: Any, tmp_path: Path, workers: int
) -> None:
    def of_other_weights(sample: Sample) -> Sample:
        return replace(sample, weights_id="someone-elses-1")

    run = LyingRun(demo_files, tmp_path / "run", each(of_other_weights), rollout={"workers": workers})
    refused = run.total(run.of_liar("refused_foreign_weights"))
    assert refused >= 1
    assert run.total("servers/refused") == refused
    assert run.log.count(f"rollout server {run.bad}: refused samples of weights that it was not sent") == 1
    assert not any(
        "/refused_" in name and run.good.removeprefix("http://") in name for line in run.lines for name in line
    )
    address = run.bad.removeprefix("http://")
    assert any(
        f"answers of {address} were refused: samples of weights" in line for line in warnings(read_run(run.folder))
    )


# ---- samples that could be true --------------------------------------------------------------------------------------


def without_routes(sample: Sample) -> Sample:
    trace = sample.trace
    uncovered = RouteTrace.uncovered(
        trace.token_ids, trace.layers, trace.top_k, sample.weight_version, num_experts=trace.num_experts
    )
    return replace(sample, trace=uncovered)


LIES: dict[str, tuple[Any, str]] = {
    "no routes": (without_routes, "0.0% of its sampled tokens have routes (at least 99.0%)"),
    "log-probs lowered by 0.5": (
        lambda sample: replace(sample, logprobs=sample.logprobs - 0.5),
        "the mean ratio of the trainer's probabilities to its own is 1.65",
    ),
    "log-probs in reversed order": (
        lambda sample: replace(sample, logprobs=sample.logprobs[::-1].copy()),
        "the mean ratio of the trainer's probabilities to its own is",
    ),
    "log-probs of -70": (
        lambda sample: replace(sample, logprobs=np.full_like(sample.logprobs, -70.0)),
        "its log-probs are a k3 of",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "old_logprobs"),
    [*((lie, "auto") for lie in LIES), ("no routes", "always"), ("log-probs of -70", "rollout")],
)
def test_a_server_that_is_not_believed_is_left_out(
    demo_files: Any, tmp_path: Path, lie: str, old_logprobs: str
) -> None:
    change, sentence = LIES[lie]
    correction = "off" if old_logprobs == "rollout" else "token_truncate"
    algorithm = {"old_logprobs": old_logprobs, "rollout_correction": correction}
    run = LyingRun(demo_files, tmp_path / "run", each(change), algorithm=algorithm, rollout=LONGER)
    assert run.log.count(f"rollout server {run.bad} is not believed, and not used again in this run: ") == 1
    assert sentence in run.log
    first, second = run.lines
    assert 0 < first["servers/excluded_fraction"] < 1
    assert second["servers/excluded_fraction"] == 0
    assert run.of_liar("tokens") in first
    assert run.of_liar("tokens") not in second  # it was not asked again
    assert second["mismatch/rollout_vs_native/k3_kl"] < 1e-6
    assert all(math.isfinite(line[name]) for line in run.lines for name in ("loss/total", "loss/grad_norm"))
    assert any(f"{run.bad.removeprefix('http://')} was not believed" in line for line in warnings(read_run(run.folder)))


@pytest.mark.slow
def test_an_update_that_is_taken_again_without_a_server_counts_once(
    demo_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[tuple[float, float]] = []
    reduce = MetricAccumulator.reduce

    def counting(metrics: MetricAccumulator, **options: Any) -> Any:
        pairs = metrics._sums.pairs
        tokens.append((float(pairs["rollout_vs_old"][0]), float(pairs["rollout_vs_train"][0])))
        return reduce(metrics, **options)

    monkeypatch.setattr(MetricAccumulator, "reduce", counting)
    run = LyingRun(demo_files, tmp_path / "run", each(without_routes), rollout=LONGER)
    assert run.lines[0]["servers/excluded_fraction"] > 0
    assert all(old == trained > 0 for old, trained in tokens)


@pytest.mark.slow
def test_a_run_stops_if_it_is_to_or_if_no_server_is_left(demo_files: Any, tmp_path: Path) -> None:
    lie, sentence = LIES["log-probs lowered by 0.5"]
    with pytest.raises(ServerCheckError, match=re.escape(sentence)):
        LyingRun(demo_files, tmp_path / "stop", each(lie), server_checks={"action": "stop"}, rollout=LONGER)
    with (
        pytest.raises(ServerCheckError, match=re.escape(sentence)),
        lying_and_honest(demo_files.model, each(lie)) as (bad, _),
    ):
        rollout = {"engine": "rollout_server", "urls": [bad], "token": TOKEN, **LONGER}
        train(tiny_config(demo_files.model, demo_files.train, tmp_path / "last", rollout=rollout))


@pytest.mark.slow
def test_a_warning_is_given_once(demo_files: Any, tmp_path: Path) -> None:
    lie, sentence = LIES["log-probs lowered by 0.5"]
    run = LyingRun(demo_files, tmp_path / "run", each(lie), server_checks={"action": "warn"}, rollout=LONGER)
    assert run.log.count(f"{run.bad} is believed although {sentence}") == 1
    assert all(run.of_liar("ratio_mean") in line for line in run.lines)


@pytest.mark.slow
def test_answers_that_repeat_are_a_warning(demo_files: Any, tmp_path: Path) -> None:
    """A proxy that answers the same prompt with the same samples: all of a group are the first."""
    run = LyingRun(demo_files, tmp_path / "run", lambda samples: [samples[0]] * len(samples), rollout=LONGER)
    assert run.total("servers/duplicates") > 0
    assert run.log.count("are bit for bit those of another request") == 1
    assert run.bad in run.log
