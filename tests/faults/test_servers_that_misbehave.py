"""Servers that answer with what cannot be true are quarantined, and their requests move to the others."""

from __future__ import annotations

import json
import logging
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tenacity")
pytest.importorskip("transformers")

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from moe_replay.engines.base import StartRequest
from moe_replay.engines.http import vocabulary_size
from moe_replay.engines.pool import EnginePool, connect
from moe_replay.engines.requests import RequestLimits
from moe_replay.engines.server.app import build_app
from moe_replay.engines.server.client import RolloutClient
from moe_replay.engines.server.serve import timed_protocol
from moe_replay.engines.server.update_body import write_update
from moe_replay.engines.sglang.client import SglangClient
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineAnswerError, EngineError, EngineUnavailableError
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.loop import train
from moe_replay.weights.checkpoint import checkpoint_tensors
from tests.engines.serving import serving
from tests.engines.tiny import VOCABULARY, tiny_model
from tests.faults.lying import TOKEN, Lying, Samples
from tests.ports import reserved_port
from tests.train.runs import tiny_config

PARAMS = SamplingParams(n=2, max_tokens=4)
PROMPTS = [[1, 2], [3, 4], [5, 6]]


class Broken:
    """An application in front of another one: answers to /generate are its own, while it has one."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self.answer: Callable[[], Response] | None = None
        self.damage: Callable[[bytes], bytes] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/generate":
            await self._app(scope, receive, send)
        elif self.answer is not None:
            await self.answer()(scope, receive, send)
        else:
            await self._app(scope, receive, self._damaging(send))

    def _damaging(self, send: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
        async def damaged(message: Any) -> None:
            if self.damage is not None and message.get("body"):
                message = message | {"body": self.damage(message["body"])}
            await send(message)

        return damaged


class Servers:
    """One server to break and one that works, of the same model."""

    def __init__(self, stack: ExitStack) -> None:
        engine = TransformersEngine(tiny_model("olmoe"), max_length=64)
        stack.callback(engine.close)
        self.lying = Lying(engine)
        self.broken = Broken(build_app(self.lying, TOKEN))  # type: ignore[arg-type]
        self.urls = [stack.enter_context(serving(app)) for app in (self.broken, build_app(engine, TOKEN))]

    def reset(self) -> None:
        self.lying.change, self.lying.asks = None, lambda params: params
        self.broken.answer = self.broken.damage = None

    def pool(self, *urls: str, **settings: Any) -> EnginePool:
        clients = [RolloutClient(url, token=TOKEN, vocab_size=VOCABULARY) for url in urls or self.urls]
        return EnginePool(clients, **{"cooldown_s": 0.05, "max_backoff_s": 0.1, "attempts": 4} | settings)


@pytest.fixture(scope="module")
def started() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def servers(started: Servers) -> Iterator[Servers]:
    yield started
    started.reset()


# ---- samples ---------------------------------------------------------------------------------------------------------


def with_logprob(value: float) -> Samples:
    def change(samples: list[Sample]) -> list[Sample]:
        logprobs = samples[1].logprobs.copy()
        logprobs[2] = value
        return [samples[0], replace(samples[1], logprobs=logprobs)]

    return change


def with_token(token: int) -> Samples:
    def change(samples: list[Sample]) -> list[Sample]:
        first, trace = samples[0], samples[0].trace
        completion = first.completion_ids.copy()
        completion[-1] = token
        tokens = np.concatenate([first.prompt_ids, completion])
        other = RouteTrace(tokens, trace.routed_experts, trace.layers, trace.valid, 0, num_experts=trace.num_experts)
        return [replace(first, completion_ids=completion, trace=other), samples[1]]

    return change


def aborted(samples: list[Sample]) -> list[Sample]:
    return [replace(sample, finish_reason=FinishReason.ABORT) for sample in samples]


def aborted_before_the_first_token(samples: list[Sample]) -> list[Sample]:
    def emptied(sample: Sample) -> Sample:
        size = len(sample.prompt_ids)
        return replace(
            sample,
            completion_ids=sample.completion_ids[:0],
            logprobs=sample.logprobs[:0],
            trace=sample.trace[:size],
            finish_reason=FinishReason.ABORT,
        )

    return [emptied(sample) for sample in samples]


SAMPLES: dict[str, tuple[Samples, str]] = {
    "nan": (with_logprob(np.nan), "an impossible log-prob"),
    "infinite": (with_logprob(-np.inf), "an impossible log-prob"),
    "of no token that is ever sampled": (with_logprob(-1e30), "an impossible log-prob"),
    "positive": (with_logprob(0.5), "an impossible log-prob"),
    "one too few": (lambda samples: samples[:1], "another number of samples: expected 2, found 1"),
    "none": (lambda samples: [], "another number of samples: expected 2, found 0"),
    "one too many": (lambda samples: [*samples, samples[0]], "another number of samples: expected 2, found 3"),
    "aborted at full length": (aborted, "a sample of full length as aborted [sample 0]: expected fewer than 4 tokens"),
    "foreign token": (with_token(VOCABULARY), "a token that the model does not have"),
}


def assert_moved(servers: Servers, cause: str) -> None:
    """The other server serves every request; of the one that misbehaves the cause is kept."""
    with servers.pool() as pool:
        groups = pool.generate(PROMPTS, PARAMS)
        assert [[sample.prompt_ids.tolist() for sample in group] for group in groups] == [[p, p] for p in PROMPTS]
        assert pool._members[0].is_quarantined
        assert cause in str(pool._members[0])
        assert pool._members[1].down_until is None


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_that_cannot_be_true(servers: Servers, kind: str) -> None:
    servers.lying.change, cause = SAMPLES[kind]
    assert_moved(servers, cause)


def test_more_tokens_than_were_asked_for(servers: Servers) -> None:
    servers.lying.asks = lambda params: replace(params, max_tokens=params.max_tokens + 3)
    assert_moved(servers, "more tokens than requested [sample 0]: expected at most 4, found 7")


def test_samples_of_another_prompt(servers: Servers) -> None:
    asked = servers.lying._engine.generate([[9, 9]], PARAMS)[0]
    servers.lying.change = lambda samples: asked
    assert_moved(servers, "a sample of another prompt")


def test_a_server_that_never_samples(servers: Servers) -> None:
    servers.lying.change = aborted_before_the_first_token
    assert_moved(servers, "aborted a request 3 times before its first token, without a weight update")


# ---- bodies ----------------------------------------------------------------------------------------------------------

BODIES: dict[str, tuple[Callable[[], Response], str]] = {
    "html": (lambda: HTMLResponse("<html>welcome</html>"), "cannot be read"),
    "204": (lambda: Response(status_code=204), "truncated in the length of the header"),
    "nothing": (lambda: Response(b""), "truncated in the length of the header"),
    "garbage": (lambda: Response(bytes(range(256)) * 9), "cannot be read"),
    "json": (lambda: Response(b"\x02\0\0\0[]"), "cannot be read"),
    "deep json": (lambda: Response(b"\x10\x27\0\0" + b"[" * 10_000), "cannot be read"),
    "not found": (lambda: HTMLResponse("<html>nothing here</html>", 404), "found 404"),
    "error": (lambda: Response("Internal Server Error", 500), "found 500"),
    "redirect": (lambda: Response(status_code=302, headers={"location": "http://127.0.0.1:1"}), "found 302"),
    "refusal": (lambda: Response('{"error": "a bearer token is needed"}', 401), "a bearer token is needed"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_that_are_no_samples(servers: Servers, kind: str) -> None:
    servers.broken.answer, cause = BODIES[kind]
    assert_moved(servers, cause)


def test_a_flipped_bit_wherever_it_is(servers: Servers) -> None:
    random, refused = np.random.default_rng(0), 0
    with RolloutClient(servers.urls[0], token=TOKEN) as client:
        for share in random.random(40).tolist():

            def flipped(body: bytes, share: float = share) -> bytes:
                at = int(share * len(body))
                return body[:at] + bytes([body[at] ^ 1 << at % 8]) + body[at + 1 :]

            servers.broken.damage = flipped
            with pytest.raises(EngineAnswerError, match="corrupted on its way"):
                client.generate([[1]], SamplingParams(max_tokens=1))
            refused += 1
    assert refused == 40
    assert_moved(servers, "corrupted on its way")


def test_a_body_without_end(servers: Servers) -> None:
    servers.broken.answer = lambda: Response(b"\0" * 100_000)
    with (
        RolloutClient(servers.urls[0], token=TOKEN, max_answer_bytes=10_000) as client,
        pytest.raises(EngineAnswerError, match="at most 10000 bytes"),
    ):
        client.generate([[1]], PARAMS)


# ---- none is left ----------------------------------------------------------------------------------------------------


def test_the_last_server_ends_the_run_and_each_cause_is_named(servers: Servers, port: int) -> None:
    servers.lying.change = SAMPLES["nan"][0]
    servers_url, dead = servers.urls[0], f"http://127.0.0.1:{port}"
    with servers.pool(servers_url) as pool, pytest.raises(EngineAnswerError) as caught:
        pool.generate(PROMPTS, PARAMS)
    assert f"no rollout server is left: found {servers_url} returned an impossible log-prob" in str(caught.value)
    with servers.pool(servers_url, dead, min_servers=1) as pool, pytest.raises(EngineUnavailableError) as unavailable:
        pool.generate(PROMPTS, PARAMS)
    assert f"{servers_url} returned an impossible log-prob" in str(unavailable.value)
    assert f"{dead} cannot be reached" in str(unavailable.value)


def test_a_quarantined_server_is_used_again_after_new_weights(servers: Servers) -> None:
    servers.lying.change = SAMPLES["nan"][0]
    with servers.pool() as pool:
        pool.generate(PROMPTS, PARAMS)
        assert pool._members[0].is_quarantined
        servers.reset()
        pool.update_weights(checkpoint_tensors(tiny_model("olmoe")), 0)
        assert pool._members[0].down_until is None
        assert len(pool.generate(PROMPTS, PARAMS)) == 3


def test_a_quarantined_server_stays_out_when_it_sleeps_and_wakes(servers: Servers) -> None:
    servers.lying.change = SAMPLES["nan"][0]
    with servers.pool() as pool:
        pool.generate(PROMPTS, PARAMS)
        assert pool._members[0].is_quarantined
        for command in (pool.sleep, pool.wake, pool.abort):
            command()
            assert [member.is_quarantined for member in pool._members] == [True, False]


def test_a_command_goes_on_with_a_server_that_waits_for_weights(servers: Servers) -> None:
    """The other one is lost: the update that follows puts this one in."""

    def lost() -> None:
        raise EngineUnavailableError("no answer")

    with servers.pool() as pool:
        pool._members[0].take_out(EngineUnavailableError("it has restarted"), 60.0)
        pool._members[1].engine.abort = lost  # type: ignore[method-assign]
        pool.abort()
        pool.exclude(pool._members[0].engine.url, "its log-probs")
        with pytest.raises(EngineUnavailableError, match="no rollout server is left"):
            pool.abort()


def test_a_server_whose_health_takes_longer_than_its_cooldown_comes_back(servers: Servers) -> None:
    """Meanwhile the next request has begun another check."""
    with servers.pool() as pool:
        member = pool._members[0]

        def healthy() -> bool:
            member.down_until = time.monotonic() + 60.0
            return True

        member.engine.healthy = healthy  # type: ignore[method-assign]
        member.take_out(EngineUnavailableError("it is busy"), 0.0)
        pool.generate(PROMPTS, PARAMS)
        assert member.down_until is None


def test_a_server_that_is_quarantined_while_its_health_is_checked_stays_out(servers: Servers) -> None:
    """Another request is still on it, and gets its answer during the check."""
    with servers.pool() as pool:
        member = pool._members[0]

        def healthy() -> bool:
            member.refuse(EngineAnswerError("a bad answer"))
            return True

        member.engine.healthy = healthy  # type: ignore[method-assign]
        member.take_out(EngineUnavailableError("it is busy"), 0.0)
        pool.generate(PROMPTS, PARAMS)
        assert member.is_quarantined


def test_a_request_that_every_server_refuses_quarantines_none(servers: Servers) -> None:
    with servers.pool() as pool:
        with pytest.raises(EngineError, match=r"every server refused a request.*is empty or as long as"):
            pool.generate([[1] * 64], PARAMS)
        assert [member.down_until for member in pool._members] == [None, None]


def test_an_update_that_one_server_refuses_goes_on_with_the_other(servers: Servers) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineError("no room for the weights")

    servers.lying.update_weights = refuse  # type: ignore[attr-defined]
    try:
        with servers.pool() as pool:
            pool.update_weights(checkpoint_tensors(tiny_model("olmoe")), 0)
            assert pool._members[0].is_quarantined
            assert "no room for the weights" in str(pool._members[0])
            assert len(pool.generate(PROMPTS, PARAMS)) == 3
    finally:
        del servers.lying.update_weights


def test_a_run_goes_on_as_if_nothing_had_happened(
    demo_files: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two servers returns NaN in every step: the metrics are those of a run without it."""

    def run(name: str, *urls: str) -> list[dict[str, Any]]:
        rollout = {"engine": "rollout_server", "urls": urls, "token": TOKEN}
        config = tiny_config(demo_files.model, demo_files.train, tmp_path / name, steps=2, rollout=rollout)
        lines = [json.loads(line) for line in (train(config) / "metrics.jsonl").read_text().splitlines()]
        return [{key: line[key] for key in line if not key.startswith(("time", "servers/"))} for line in lines]

    with ExitStack() as stack:
        engines = [TransformersEngine.from_pretrained(demo_files.model) for _ in range(2)]
        lying = Lying(engines[0])
        lying.change = lambda samples: [replace(each, logprobs=each.logprobs * np.nan) for each in samples]
        apps = [build_app(lying, TOKEN), build_app(engines[1], TOKEN)]  # type: ignore[list-item]
        bad, good = (stack.enter_context(serving(app)) for app in apps)
        disturbed = run("disturbed", bad, good)
        assert f"quarantined until its next weight update: {bad} returned an impossible log-prob" in caplog.text
        assert disturbed == run("calm", good)


# ---- at the start ----------------------------------------------------------------------------------------------------


def test_a_server_that_is_dead_at_the_start(servers: Servers, port: int, caplog: pytest.LogCaptureFixture) -> None:
    dead, alive = f"http://127.0.0.1:{port}", servers.urls[1]
    with pytest.raises(EngineUnavailableError, match=f"{dead} cannot be reached"):
        servers.pool(dead, alive)
    with reserved_port() as other, pytest.raises(EngineUnavailableError, match="too few servers can be used") as caught:
        servers.pool(dead, f"http://127.0.0.1:{other}", alive, min_servers=2)
    assert dead in str(caught.value)
    request = StartRequest(model="", urls=(dead, alive), token=TOKEN, min_servers=1)
    with caplog.at_level(logging.WARNING), connect(RolloutClient, request) as pool:
        assert f"{dead} cannot be reached" in caplog.text
        pool.update_weights(checkpoint_tensors(tiny_model("olmoe")), 0)
        assert len(pool.generate(PROMPTS, PARAMS)) == 3


def test_the_vocabulary_is_that_of_the_config(tmp_path: Path) -> None:
    assert vocabulary_size(str(tmp_path)) is None
    for config, size in [({"vocab_size": 7}, 7), ({"text_config": {"vocab_size": 8}}, 8), ([], None), ({}, None)]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert vocabulary_size(str(tmp_path)) == size


# ---- other servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        *("", "<html>", "null", "[]", "[[]]", "5", '"x"', "{}", "\x00", "[" * 10_000),
        '{"meta_info": 5}',
        '{"meta_info": {}, "output_ids": [1]}',
        '{"meta_info": {"finish_reason": {"type": "stop"}}, "output_ids": [1e999]}',
    ],
    ids=lambda body: body[:20],
)
def test_answers_that_are_not_sglangs(body: str) -> None:
    async def answer(request: Any) -> Response:
        known = {"/server_info": {"version": "0.5", "model_path": "m"}, "/model_info": {"weight_version": "default"}}
        return Response(json.dumps(known[request.url.path]) if request.url.path in known else body)

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    topology = MoeTopology(1, (MoeLayer(0, 4, 2),))
    with serving(app) as url, SglangClient(url, topology=topology) as client, pytest.raises(EngineError) as caught:
        client.generate([[1, 2]], SamplingParams(max_tokens=2))
    assert "\n" not in str(caught.value)


# ---- clients that misbehave ------------------------------------------------------------------------------------------

HEADERS = {"authorization": f"Bearer {TOKEN}"}
ATTEMPTS = 20
T = TypeVar("T")


class Served:
    """A server with tight limits, and its clients' raw connections.

    A machine that stalls may keep any request longer than the limit: it is sent again.
    """

    def __init__(self, stack: ExitStack, **limits: Any) -> None:
        self.engine = TransformersEngine(tiny_model("olmoe"), max_length=64)
        stack.callback(self.engine.close)
        tight = RequestLimits(**{"max_samples": 8, "max_json_bytes": 10_000} | limits)
        app = build_app(self.engine, TOKEN, limits=tight)
        self.url = stack.enter_context(serving(app, http=timed_protocol(tight)))
        self._stack = stack

    def connection(self) -> socket.socket:
        address = ("127.0.0.1", int(self.url.rpartition(":")[2]))
        return self._stack.enter_context(socket.create_connection(address, timeout=60))

    def used_connection(self) -> socket.socket:
        """A connection that has served a request."""

        def connect() -> socket.socket:
            connection = self.connection()
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            if not (answer := connection.recv(10_000)):
                raise ConnectionResetError
            assert answer.startswith(b"HTTP/1.1 200")
            return connection

        return in_time(connect)

    def post(self, path: str, content: bytes) -> httpx.Response:
        return in_time(lambda: httpx.post(self.url + path, content=content, headers=HEADERS, timeout=60))

    def check_alive(self) -> None:
        """It still samples, with the weights that it should have."""
        with RolloutClient(self.url, token=TOKEN) as client:
            assert len(in_time(lambda: client.generate([[1, 2]], PARAMS))[0]) == 2


def in_time(ask: Callable[[], T]) -> T:
    """What a server with tight limits answers once a request reaches it within them."""
    for _ in range(ATTEMPTS - 1):
        try:
            answer = ask()
        except (ConnectionError, httpx.TransportError, EngineUnavailableError):
            continue
        except EngineError as refusal:
            if refusal.found != 408:
                raise
            continue
        if not isinstance(answer, httpx.Response) or answer.status_code != 408:
            return answer
    return ask()


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:
        yield lambda **limits: Served(stack, **limits)


def request_head(path: str, length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"authorization: Bearer {TOKEN}", f"content-length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_requests_that_would_harm_the_engine(served: Callable[..., Served]) -> None:
    server = served()
    fine = {"prompt_ids": [1, 2], "params": {"max_tokens": 2}}
    bad = [{"prompt_ids": ids} for ids in ([-1], [1, VOCABULARY], [2**40], [10**400])]
    params = [
        {"n": 10**6},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [VOCABULARY]},
        {"seed": 2**63},
        {"top_k": 2**40},
    ]
    bad += [{"params": each} for each in [*params, {"max_tokens": 2**40}]]
    contents = [json.dumps(fine | each).encode() for each in bad]
    contents += [json.dumps(fine).replace("2}", '2, "temperature": 1e999}').encode(), b"[" * 9000, b"\xff"]
    for content in contents:
        answer = server.post("/generate", content)
        assert (answer.status_code, bool(answer.json()["error"])) == (422, True), content
    assert server.post("/prompt_logprobs", b'{"token_ids": [-1, 2]}').status_code == 422
    assert server.post("/generate", b" " * 20_000).status_code == 413
    server.check_alive()


def test_the_engine_itself_refuses_tokens_that_it_does_not_have() -> None:
    engine = TransformersEngine(tiny_model("olmoe"), max_length=64)
    for ids in ([-1], [VOCABULARY]):
        with pytest.raises(EngineError, match="not in the model's vocabulary"):
            engine.generate([[1], ids], PARAMS)
        with pytest.raises(EngineError, match="not in the model's vocabulary"):
            engine.prompt_logprobs([1, *ids])
    engine.close()


@pytest.mark.parametrize("path", ["/generate", "/weights"])
def test_half_a_body_is_not_waited_for(served: Callable[..., Served], path: str) -> None:
    server = served(body_s=0.2)
    body = b"".join(write_update(checkpoint_tensors(tiny_model("olmoe")), 0, None))
    connection = server.connection()
    connection.sendall(request_head(path, len(body)) + body[: len(body) // 2 if path == "/weights" else 10])
    assert connection.recv(12) == b"HTTP/1.1 408"
    if path == "/weights":
        assert server.post("/generate", b'{"prompt_ids": [1], "params": {}}').status_code == 409
        assert server.post("/weights", body).status_code == 200
    server.check_alive()


@pytest.mark.parametrize(("path", "limits"), [("/generate", {"body_s": 0.5}), ("/weights", {"update_s": 0.5})])
def test_a_body_that_comes_byte_by_byte(served: Callable[..., Served], path: str, limits: dict[str, float]) -> None:
    server = served(**limits)
    connection = server.connection()
    connection.sendall(request_head(path, 10**6) + struct.pack("<Q", 10**5))  # of weights, the size of the first part
    while not select.select([connection], [], [], 0.02)[0]:
        with suppress(ConnectionError):  # it has answered meanwhile
            connection.sendall(b"\0")
    assert connection.recv(12) == b"HTTP/1.1 408"


def test_headers_that_are_never_finished(served: Callable[..., Served]) -> None:
    server = served(header_s=0.3)
    connections = [server.connection() for _ in range(900)]
    for number, connection in enumerate(connections):
        connection.sendall(request_head("/generate", 10)[: 5 + number % 60])
    used = server.used_connection()
    used.sendall(b"GET /health HT")
    for connection in [*connections, server.connection(), used]:
        assert until_closed(connection) in (b"", b'{"alive":true}')
    server.check_alive()


def until_closed(connection: socket.socket) -> bytes:
    """What is sent until the server closes the connection."""
    received = b""
    try:
        while part := connection.recv(10_000):
            received += part
    except ConnectionResetError:
        pass
    return received


def test_more_connections_than_allowed(served: Callable[..., Served]) -> None:
    server = served(max_connections=2)
    first, second, third = (server.connection() for _ in range(3))
    assert until_closed(third) == b""
    first.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    assert b'{"alive":true}' in until_closed(first)
    second.close()
    server.check_alive()
