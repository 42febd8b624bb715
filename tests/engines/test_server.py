"""The rollout server and its client: the same engine, with a wire in between."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from moe_replay.engines.pool import EnginePool
from moe_replay.engines.server.client import RolloutClient
from moe_replay.engines.server.sample_wire import encode_samples
from moe_replay.engines.server.update_body import write_update
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.weights.checkpoint import checkpoint_tensors
from moe_replay.weights.identity import Probe
from tests.engines.serving import responds, serving
from tests.engines.tiny import Pause, assert_sampled_from, reference, tiny_model

TOKEN = "open sesame"
PROBE = list(range(1, 40))


@pytest.fixture
def engine() -> TransformersEngine:
    return TransformersEngine(tiny_model("qwen3_moe"), max_length=240)


@pytest.fixture
def url(engine: TransformersEngine) -> Iterator[str]:
    pytest.importorskip("starlette", reason="the server's own dependencies come with vLLM")
    from moe_replay.engines.server.app import build_app

    with serving(build_app(engine, TOKEN, max_requests=4)) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[RolloutClient]:
    with RolloutClient(url, token=TOKEN) as made:
        yield made


def probe(model: torch.nn.Module) -> Probe:
    return Probe(token_ids=PROBE, logprobs=reference(model, np.array(PROBE)).logprobs, tolerance=1e-3)


def test_samples_are_those_of_the_engine(client: RolloutClient, engine: TransformersEngine) -> None:
    asked, params = [[1, 2, 3], [4], list(range(1, 50))], SamplingParams(n=3, max_tokens=5, seed=1, temperature=0.7)
    alone = [engine.generate([prompt], params)[0] for prompt in asked]  # as the server runs them: bit-equal
    for near, far in zip(alone, client.generate(asked, params), strict=True):
        for one, other in zip(near, far, strict=True):
            assert one.trace == other.trace
            assert (one.finish_reason, one.weight_version) == (other.finish_reason, other.weight_version)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_sampling_masks_come_with_the_samples(client: RolloutClient, engine: TransformersEngine) -> None:
    params = SamplingParams(n=2, max_tokens=5, seed=1, top_p=0.8, sampling_mask=True)
    for near, far in zip(engine.generate([[1, 2]], params)[0], client.generate([[1, 2]], params)[0], strict=True):
        assert near.sampling_mask is not None
        assert near.sampling_mask.counts.min() > 0
        assert far.sampling_mask == near.sampling_mask


def test_the_client_knows_the_engine(client: RolloutClient, engine: TransformersEngine) -> None:
    assert client.name == engine.name
    assert client.topology == engine.topology
    assert client.weight_version == 0
    assert responds(client)
    np.testing.assert_allclose(client.prompt_logprobs(PROBE), engine.prompt_logprobs(PROBE), atol=1e-6)


def test_prompts_one_by_one_from_a_running_loop(client: RolloutClient) -> None:
    async def both() -> list[list[Sample]]:
        return await asyncio.gather(*(client.generate_one(prompt, SamplingParams()) for prompt in ([1, 2], [3])))

    assert [sample.prompt_ids.tolist() for (sample,) in asyncio.run(both())] == [[1, 2], [3]]


@pytest.mark.slow
def test_more_prompts_than_the_server_takes_wait_in_the_client(url: str) -> None:
    with RolloutClient(url, token=TOKEN, max_concurrent=4) as client:
        assert len(client.generate([[token] for token in range(1, 20)], SamplingParams(max_tokens=2))) == 19
    with (
        RolloutClient(url, token=TOKEN, max_concurrent=32) as client,
        pytest.raises(EngineUnavailableError, match="503"),
    ):
        client.generate([[token] for token in range(1, 30)], SamplingParams(max_tokens=100))


@pytest.mark.parametrize("form", ["stream", "folder"])
def test_new_weights(client: RolloutClient, form: str, tmp_path: Path) -> None:
    new = tiny_model("qwen3_moe", seed=1)
    new.save_pretrained(tmp_path)
    client.update_weights(checkpoint_tensors(new) if form == "stream" else tmp_path, version=2, probe=probe(new))
    assert client.weight_version == 2
    ((sample,),) = client.generate([[1, 2, 3]], SamplingParams(max_tokens=6))
    assert sample.weight_version == 2
    assert_sampled_from(new, sample)


def test_an_update_that_fails_is_told(client: RolloutClient) -> None:
    new = tiny_model("qwen3_moe", seed=1)
    with pytest.raises(EngineError, match="left parameters as they were"):
        client.update_weights(iter(list(checkpoint_tensors(new))[:-1]), version=1)
    with pytest.raises(EngineError, match="did not succeed"):
        client.generate([[1]], SamplingParams())
    with pytest.raises(EngineError, match="does not compute with the weights"):
        client.update_weights(checkpoint_tensors(new), version=1, probe=probe(tiny_model("qwen3_moe")))
    with pytest.raises(EngineError, match="no weights in the folder"):
        client.update_weights(Path("nowhere"), version=1)
    client.update_weights(checkpoint_tensors(new), version=1)
    assert client.weight_version == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"logprobs": [-1.0] * 3}, "one log-prob for every token but the first"),
        ({"token_ids": [1], "logprobs": []}, "one log-prob for every token but the first"),
        ({"logprobs": ["nan"] * (len(PROBE) - 1)}, "finite"),
        ({"tolerance": -1.0}, "tolerance of a probe is out of range"),
        ({"tolerance": "inf"}, "tolerance of a probe is out of range"),
        ({"tolerance": "nan"}, "tolerance of a probe is out of range"),
    ],
)
def test_a_probe_that_proves_nothing_is_refused_before_the_weights(
    client: RolloutClient, url: str, change: dict[str, Any], problem: str
) -> None:
    sent = {"token_ids": PROBE, "logprobs": [-1.0] * (len(PROBE) - 1), "tolerance": 0.1} | change
    header = json.dumps({"version": 1, "probe": sent}).encode()
    headers = {"authorization": f"Bearer {TOKEN}"}
    body = struct.pack("<Q", len(header)) + header + bytes(8)
    answer = httpx.post(f"{url}/weights", content=body, headers=headers, timeout=60)
    assert answer.status_code == 409
    assert problem in answer.json()["error"]
    assert client.generate([[1]], SamplingParams())[0][0].weight_version == 0  # nothing was replaced


def test_an_update_without_its_end_is_no_update(client: RolloutClient, url: str) -> None:
    body = b"".join(write_update(checkpoint_tensors(tiny_model("qwen3_moe", seed=1)), 1, None))
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{url}/weights", content=body[:-8], headers=headers, timeout=60)
    assert answer.status_code == 400
    assert "is truncated" in answer.json()["error"]
    with pytest.raises(EngineError, match="did not succeed"):
        client.generate([[1]], SamplingParams())
    assert httpx.post(f"{url}/weights", content=b"\xff" * 40, headers=headers, timeout=60).status_code == 409


@pytest.mark.parametrize("token", [None, "open sesam", "open sesame!", "öffne"])
def test_nothing_without_the_token(url: str, token: str | None) -> None:
    headers = {} if token is None else {"authorization": f"Bearer {token}".encode()}
    paths = [("GET", "/info"), *(("POST", path) for path in ("/generate", "/weights", "/sleep", "/wake", "/abort"))]
    for method, path in paths:
        answer = httpx.request(method, url + path, headers=headers, timeout=60)  # type: ignore[arg-type]
        assert answer.status_code == 401, path
    assert httpx.get(f"{url}/health", timeout=60).json() == {"alive": True}


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"prompt_ids": [], "params": {}},
        {"prompt_ids": ["1"], "params": {}},
        {"prompt_ids": [1], "params": {"n": 0}},
        {"prompt_ids": [1], "params": {"temprature": 1}},
        {"prompt_ids": [1], "params": {}, "more": 1},
    ],
)
def test_requests_that_make_no_sense(url: str, asked: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(f"{url}/generate", json=asked, headers=headers, timeout=60)
    assert answer.status_code == 422
    assert answer.json()["error"]


def test_sleep_wake_and_what_the_engine_refuses(client: RolloutClient) -> None:
    client.sleep()
    with pytest.raises(EngineError, match="is asleep"):
        client.generate([[1]], SamplingParams())
    client.wake()
    assert client.generate([[1]], SamplingParams(max_tokens=1))
    with pytest.raises(EngineError, match="is empty or as long as"):
        client.generate([[1] * 240], SamplingParams())


def test_levels_of_sleep_reach_an_engine_that_has_them(
    client: RolloutClient, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.sleep(level=2)  # this engine has none
    client.wake_for_update()
    assert client.generate([[1]], SamplingParams(max_tokens=1))
    told: list[Any] = []
    monkeypatch.setattr(engine, "sleep", lambda level=1: told.append(level))
    monkeypatch.setattr(engine, "wake", lambda: told.append("wake"))
    monkeypatch.setattr(engine, "wake_for_update", lambda: told.append("wake for update"), raising=False)
    with EnginePool([client]) as pool:
        for command in (pool.sleep, pool.wake, lambda: pool.sleep(level=2), pool.wake_for_update):
            command()
    assert told == [1, "wake", 2, "wake for update"]


def test_an_abort_brings_back_what_there_is(client: RolloutClient, engine: TransformersEngine) -> None:
    paused, results = Pause(engine.model, forwards=4), []
    thread = threading.Thread(
        target=lambda: results.extend(client.generate([[1, 2]], SamplingParams(n=2, max_tokens=230)))
    )
    thread.start()
    with paused:
        client.abort()
    thread.join()
    for sample in results[0]:
        assert sample.finish_reason is FinishReason.ABORT
        assert_sampled_from(tiny_model("qwen3_moe"), sample)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_server_that_ends_returns_no_part_of_a_sample_with_a_seed(
    engine: TransformersEngine, seed: int | None
) -> None:
    """Another server samples it anew, with the same random numbers; other samples go on where they ended."""
    pytest.importorskip("starlette")
    from moe_replay.engines.server.app import build_app

    app, found = build_app(engine, TOKEN), []
    params = SamplingParams(max_tokens=230, seed=seed)
    paused = Pause(engine.model, forwards=4)

    def ask() -> None:
        try:
            found.append(client.generate([[1, 2]], params)[0][0].finish_reason)
        except EngineUnavailableError as error:
            found.append(error)

    with serving(app) as address, RolloutClient(address, token=TOKEN) as client:
        thread = threading.Thread(target=ask)
        thread.start()
        with paused:
            app.state.is_ending = True
            engine.abort()
        thread.join()
    assert found == [FinishReason.ABORT] if seed is None else "the server is ending" in str(found[0])


def test_a_request_takes_no_longer_than_its_time(url: str, engine: TransformersEngine) -> None:
    with (
        RolloutClient(url, token=TOKEN, timeout=0.3) as client,
        engine._lock,
        pytest.raises(EngineUnavailableError, match="cannot be reached"),
    ):
        client.generate([[1]], SamplingParams())


class EndlessEngine(TransformersEngine):
    """Samples until it is told to stop."""

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return []


def test_what_nobody_waits_for_is_given_up() -> None:
    pytest.importorskip("starlette", reason="the server's own dependencies come with vLLM")
    from moe_replay.engines.server.app import build_app

    engine = EndlessEngine(tiny_model("olmoe"))
    engine.begun, engine.cancelled = threading.Event(), threading.Event()
    with serving(build_app(engine, TOKEN)) as address, RolloutClient(address, token=TOKEN, timeout=0.3) as client:
        while not engine.begun.is_set():  # a slow machine may give up before the engine has heard of the request
            with pytest.raises(EngineUnavailableError):
                client.generate([[1]], SamplingParams())
        assert engine.cancelled.wait(timeout=60)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "[", "10.0.0.1"])
def test_a_foreign_name_of_the_loopback_is_refused(url: str, host: str) -> None:
    """As a browser sends it for a website whose name resolves to this machine."""
    for path in ("/health", "/info"):
        headers = {"host": host, "authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(url + path, headers=headers, timeout=60)
        assert answer.status_code == 421, path


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:8000", socket.gethostname()])
def test_names_of_the_loopback_are_not(url: str, host: str) -> None:
    assert httpx.get(f"{url}/health", headers={"host": host}, timeout=60).status_code == 200


def test_a_server_that_is_not_there(port: int) -> None:
    with RolloutClient(f"http://127.0.0.1:{port}", token=TOKEN) as client:
        assert not client.healthy()
        with pytest.raises(EngineUnavailableError, match="cannot be reached"):
            client.generate([[1]], SamplingParams())
        with pytest.raises(EngineUnavailableError, match="cannot be reached"):
            client.sleep()


def test_the_prompt_of_a_group_travels_once(client: RolloutClient) -> None:
    long = list(range(1, 90)) * 2
    (group,) = client.generate([long], SamplingParams(n=8, max_tokens=2))
    layers, top_k = len(group[0].trace.layers), group[0].trace.top_k
    assert len(encode_samples(group)) < len(long) * (layers * top_k + 4) + 8 * 700 + 2000


def test_requests_that_the_web_server_cancels_are_answered_as_those_of_a_server_that_ends(
    engine: TransformersEngine,
) -> None:
    """When it ends, and requests take longer than it waits for them. A status of 500 would end a run of training."""
    pytest.importorskip("starlette", reason="the server's own dependencies come with vLLM")
    from moe_replay.engines.server.app import build_app

    async def cancelled() -> list[Any]:
        begun, sent = asyncio.Event(), []

        async def receive() -> Any:
            begun.set()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": headers}
        answering = asyncio.ensure_future(build_app(engine, TOKEN, max_requests=4)(scope, receive, send))
        await begun.wait()
        answering.cancel()
        await answering
        return sent

    start, body = asyncio.run(cancelled())
    assert start["status"] == 503
    assert b"the server is ending" in body["body"]
