"""Routes that nothing replays or compares: they are neither asked for, nor sent, nor stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.trajectory_bytes import trajectories_from_bytes, trajectories_to_bytes

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from moe_replay.engines.server import client
from moe_replay.engines.server.app import build_app
from moe_replay.engines.server.sample_wire import decode_samples, encode_samples
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.interop.capture import is_unrouted
from moe_replay.records import Sample, SamplingParams, Trajectory
from moe_replay.tools.plan import RouteBytes
from moe_replay.train.learn.replay_mode import asks_for_routes
from moe_replay.train.loop import train
from moe_replay.train.trajectories.wire import record_parts
from tests.engines.serving import serving
from tests.engines.tiny import tiny_model

Config = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]
TOKEN = "secret"


@pytest.mark.parametrize(
    ("replay", "log", "asked"),
    [
        ({"mode": "off", "observe": False}, {}, False),
        ({"mode": "r2", "observe": False}, {}, False),  # the trainer's own routes
        ({"mode": "off", "observe": False}, {"traces": 1}, True),
        ({"mode": "off"}, {}, True),
        ({"mode": "r3", "observe": False}, {}, True),
    ],
)
def test_routes_are_asked_for_where_something_needs_them(config: Config, replay: Any, log: Any, asked: bool) -> None:
    assert asks_for_routes(config(replay=replay, log=log)) is asked


def test_routes_are_asked_for_where_micro_batches_are_divided_by_them(config: Config) -> None:
    replay, backend = {"mode": "r2", "observe": False}, {"device": "cpu", "expert_parallel": 2}
    assert asks_for_routes(config(replay=replay, backend=backend, batch={"balance": "experts"}))
    assert not asks_for_routes(config(replay=replay, backend=backend))


def test_a_sample_without_routes_is_the_same_sample() -> None:
    engine = TransformersEngine(tiny_model("olmoe"))
    params = {"n": 2, "max_tokens": 40, "seed": 5}
    with_routes = engine.generate([[1, 2, 3]], SamplingParams(**params))[0]
    without = engine.generate([[1, 2, 3]], SamplingParams(**params, routes=False))[0]
    engine.close()
    for one, other in zip(with_routes, without, strict=True):
        assert is_unrouted(other.trace)
        np.testing.assert_array_equal(one.completion_ids, other.completion_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    sizes = [len(encode_samples(samples)) for samples in (with_routes, without)]
    text = len(encode_samples([])) + 600  # headers
    assert sizes[1] < 2 * (43 * 9 + 300) + text
    assert sizes[1] < sizes[0]
    assert all(is_unrouted(sample.trace) for sample in decode_samples(encode_samples(without)))


def test_a_record_has_tokens_alone_for_any_pipeline_stage() -> None:
    engine = TransformersEngine(tiny_model("olmoe"))
    (sample,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30, ignore_eos=True, routes=False))[0]
    one, layers, topology = trajectory_of(sample), engine.topology.layers, engine.topology
    engine.close()
    for stage in (layers, layers[1:], ()):
        (read,) = trajectories_from_bytes(trajectories_to_bytes([one], stage))
        np.testing.assert_array_equal(read.token_ids, one.token_ids)
        size = sum(map(len, record_parts(one, stage)))
        assert size == RouteBytes(topology, with_routes=False).record(len(one), len(stage))
    assert size < RouteBytes(topology).record(len(one), len(layers))


def trajectory_of(sample: Sample) -> Trajectory:
    prompt, completion = len(sample.prompt_ids), len(sample.completion_ids)
    return Trajectory(
        token_ids=sample.trace.token_ids,
        logprobs=np.concatenate([np.zeros(prompt, np.float32), sample.logprobs]),
        versions=np.repeat([-1, 0], [prompt, completion]),
        trace=sample.trace,
        finish_reason=sample.finish_reason,
        row=0,
        group=0,
    )


@pytest.mark.slow
def test_a_run_gets_no_routes_from_its_server_unless_it_needs_them(
    config: Config, metrics_of: Metrics, demo_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bytes that arrive; what is learned is the same. An evaluation, of one sample a prompt, never does."""
    received: list[tuple[int, int]] = []  # bytes of a response, and rows of routes in it
    evaluated: list[int] = []  # rows of routes in a response of an evaluation

    def decode(body: bytes) -> list[Sample]:
        samples = decode_samples(body)
        rows = sum(int(sample.trace.valid.sum()) for sample in samples)
        received.append((len(body), rows))
        if len(samples) == 1:
            evaluated.append(rows)
        return samples

    monkeypatch.setattr(client, "decode_samples", decode)
    engine = TransformersEngine.from_pretrained(demo_files.model)
    with serving(build_app(engine, TOKEN)) as url:
        rollout = {"engine": "rollout_server", "urls": [url], "token": TOKEN}
        settings = {"steps": 2, "rollout": rollout, "eval": {"every": 1, "prompts": 2}}
        settings["data"] = {"eval_path": str(demo_files.eval)}
        lines, sizes, rows = [], [], []
        for observe in (True, False):
            received.clear()
            made = config(f"{observe}", **settings, replay={"mode": "off", "observe": observe})
            lines.append(metrics_of(train(made)))
            sizes.append(sum(size for size, _ in received))
            rows.append(sum(count for _, count in received))
    engine.close()
    assert rows[0] > 0
    assert rows[1] == 0
    assert evaluated == [0] * 8
    assert sizes[1] < sizes[0]
    for seen, unseen in zip(*lines, strict=True):
        assert not [name for name in unseen if name.startswith("routing/")]
        assert {name: seen[name] for name in unseen} == unseen
