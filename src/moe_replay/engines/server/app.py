"""An engine behind HTTP: the application that `moe-replay rollout` serves and `RolloutClient` is the client of.

POST /generate   {"prompt_ids": [...], "params": {...}} -> samples in the format of `sample_wire`
POST /weights    the body of `engines/server/update_body.py`: weights, or an adapter
POST /prompt_logprobs {"token_ids": [...]} -> {"logprobs": [...]}
POST /sleep      ?level=2: the weights need not be kept
POST /wake       ?for_update=1: an update with all weights comes next
POST /abort
GET  /info       engine, topology, version and id of the weights; also the response to /weights
GET  /health     the only one without a token
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.from_thread
import anyio.to_thread
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moe_replay.engines.base import Engine
from moe_replay.engines.requests import DIGEST_HEADER, RequestLimits, content_digest
from moe_replay.engines.server.sample_wire import MEDIA_TYPE, encode_samples
from moe_replay.engines.server.update_body import read_header, read_tensors, read_transfer
from moe_replay.errors import EngineError, EngineUnavailableError, MoeReplayError
from moe_replay.records import FinishReason, SamplingParams
from moe_replay.utils.misc import is_loopback

T = TypeVar("T")


class _Generate(BaseModel, extra="forbid", strict=True):
    prompt_ids: list[int] = Field(min_length=1)
    params: SamplingParams


class _TokenIds(BaseModel, extra="forbid", strict=True):
    token_ids: list[int] = Field(min_length=2)


def build_app(engine: Engine, token: str, max_requests: int = 256, limits: RequestLimits | None = None) -> Starlette:
    """Return the application. At most `max_requests` prompts are sampled concurrently; further requests get a 503.

    Once its `state.is_ending` is set, an aborted request with a seed gets one too: another server samples it again.
    """

    service = _Service(engine, token, max_requests, limits or RequestLimits())
    posts = {
        "/generate": service.generate,
        "/weights": service.weights,
        "/prompt_logprobs": service.prompt_logprobs,
        "/sleep": service.sleep,
        "/wake": service.wake,
        "/abort": partial(service.command, engine.abort),
    }
    routes = [Route(path, service.guarded(work), methods=["POST"]) for path, work in posts.items()]
    routes.append(Route("/info", service.guarded(service.info), methods=["GET"]))
    routes.append(Route("/health", service.guarded(service.health, needs_token=False), methods=["GET"]))
    app = Starlette(routes=routes)
    app.state.is_ending = False
    return app


class _ResponseError(Exception):
    """An error response."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Service:
    """Request handlers of one engine."""

    def __init__(self, engine: Engine, token: str, max_requests: int, limits: RequestLimits) -> None:
        self.engine = engine
        self.limits = limits
        self.max_requests = max_requests
        self._token = token.encode()
        self._active = 0

    def guarded(
        self, work: Callable[[Request], Awaitable[Response]], *, needs_token: bool = True
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: it requires the token, and errors become responses with their text."""

        async def handler(request: Request) -> Response:
            try:
                _check_host(request)
                if needs_token:
                    self._check_token(request.headers.get("authorization", ""))
                return await work(request)
            except _ResponseError as error:
                return JSONResponse({"error": str(error)}, error.status)
            except ValidationError as error:
                return JSONResponse({"error": str(error)}, 422)
            except EngineUnavailableError as error:
                return JSONResponse({"error": str(error)}, 503)
            except MoeReplayError as error:
                return JSONResponse({"error": str(error)}, 409)
            except asyncio.CancelledError:  # by the web server, which would answer that something is broken
                return JSONResponse({"error": "the server is ending"}, 503)

        return handler

    def _check_token(self, header: str) -> None:
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.encode(), self._token):
            raise _ResponseError(401, "a bearer token is needed, the one that the server was started with")

    async def health(self, request: Request) -> Response:
        alive = self.engine.healthy()
        return JSONResponse({"alive": alive}, 200 if alive else 503)

    async def info(self, request: Request) -> Response:
        topology = self.engine.topology
        lora, receivers = self.engine.lora, self.engine.receivers
        return JSONResponse(
            {
                "engine": list(self.engine.name),
                "weight_version": self.engine.weight_version,
                "weights_id": self.engine.weights_id,
                "lora": None if lora is None else [lora.rank, list(lora.modules)],
                "receivers": None if receivers is None else [receivers.device, list(receivers.ids)],
                "opens": [] if receivers is None else list(receivers.opens),
                "num_layers": topology.num_layers,
                "model_type": topology.model_type,
                "moe_layers": [[moe.layer, moe.num_experts, moe.top_k] for moe in topology.moe_layers],
            }
        )

    async def generate(self, request: Request) -> Response:
        """Sample one prompt; cancelled when the client disconnects."""
        prompt = _Generate.model_validate_json(await self._body(request))
        self._check(prompt.prompt_ids, prompt.params)
        if self._active >= self.max_requests:
            raise _ResponseError(503, f"{self._active} requests are running already")
        self._active += 1
        try:
            samples = await _while_connected(request, self.engine.generate_one(prompt.prompt_ids, prompt.params))
        finally:
            self._active -= 1
        is_aborted = any(sample.finish_reason is FinishReason.ABORT for sample in samples)
        if prompt.params.seed is not None and request.app.state.is_ending and is_aborted:
            raise _ResponseError(503, "the server is ending")  # the rest of it would have other random numbers
        body = await anyio.to_thread.run_sync(encode_samples, samples)
        return Response(body, media_type=MEDIA_TYPE, headers={DIGEST_HEADER: content_digest(body)})

    def _check(self, token_ids: list[int], params: SamplingParams | None = None) -> None:
        """Refuse what would harm the engine."""
        try:
            self.limits.check(token_ids, params, self.engine.vocab_size)
        except EngineError as error:
            raise _ResponseError(422, str(error)) from error

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request that is not too large and does not take too long."""
        body = bytearray()
        try:
            with anyio.fail_after(self.limits.body_s):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.limits.max_json_bytes:
                        raise _ResponseError(413, f"a request has at most {self.limits.max_json_bytes} bytes")
        except TimeoutError as slow:
            raise _ResponseError(408, f"the body of a request takes at most {self.limits.body_s:g} s") from slow
        except ClientDisconnect as gone:
            raise _ResponseError(400, "the client disconnected during a request") from gone
        return bytes(body)

    async def prompt_logprobs(self, request: Request) -> Response:
        sequence = _TokenIds.model_validate_json(await self._body(request))
        self._check(sequence.token_ids)
        logprobs = await anyio.to_thread.run_sync(self.engine.prompt_logprobs, sequence.token_ids)
        return JSONResponse({"logprobs": logprobs.tolist()})

    async def weights(self, request: Request) -> Response:
        """Update the weights, read from the request while the engine loads them."""
        body = _BodyReader(request, self.limits)
        await anyio.to_thread.run_sync(self._update, body.read)
        return await self.info(request)

    def _update(self, read: Callable[[int], bytes]) -> None:
        header = read_header(read)
        if header.probe is not None:
            self._check(header.probe.token_ids)
        stamp = (header.version, header.to_probe(), header.weights_id)
        if header.adapter is not None:
            self.engine.update_adapter(header.adapter.with_tensors(read_tensors(read)), *stamp)
        elif header.transfer is not None:
            self.engine.receive_weights(read_transfer(read, header.transfer), *stamp)
        elif header.folder is not None:
            self.engine.update_weights(Path(header.folder), *stamp)
        else:
            self.engine.update_weights(read_tensors(read), *stamp)

    async def sleep(self, request: Request) -> Response:
        level = 2 if request.query_params.get("level") == "2" else 1
        return await self.command(partial(self.engine.sleep, level), request)

    async def wake(self, request: Request) -> Response:
        """Undo `sleep`, or prepare for an update."""
        before_update = bool(request.query_params.get("for_update"))
        return await self.command(self.engine.wake_for_update if before_update else self.engine.wake, request)

    async def command(self, work: Callable[[], None], request: Request) -> Response:
        await anyio.to_thread.run_sync(work)
        return await self.info(request)


class _BodyReader:
    """Lets a worker thread read the body of a request as it arrives."""

    def __init__(self, request: Request, limits: RequestLimits) -> None:
        self._stream = request.stream()
        self._buffer = bytearray()
        self._limits = limits
        self._ends_at = anyio.current_time() + limits.update_s

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes; raise if the body ends before, or stalls."""
        return anyio.from_thread.run(self._read, size)

    async def _read(self, size: int) -> bytes:
        try:
            while len(self._buffer) < size:
                with anyio.fail_after(min(self._limits.body_s, self._ends_at - anyio.current_time())):
                    chunk = await anext(self._stream, None)
                if chunk is None:
                    raise _ResponseError(400, "the body of the update is truncated")
                self._buffer += chunk
        except ClientDisconnect as gone:
            raise _ResponseError(400, "the client disconnected during an update") from gone
        except TimeoutError as slow:
            raise _ResponseError(408, f"an update takes at most {self._limits.update_s:g} s") from slow
        with memoryview(self._buffer) as received:
            taken = bytes(received[:size])
        del self._buffer[:size]
        return taken


def _check_host(request: Request) -> None:
    """Refuse a request over the loopback under a foreign name: a website whose name resolves to it may have sent it."""
    server = request.scope.get("server")
    if server is None or not is_loopback(server[0]):
        return
    hosts = request.headers.getlist("host")
    try:
        name = (urlsplit(f"//{hosts[0]}").hostname or "") if len(hosts) == 1 else ""
    except ValueError:
        name = ""
    own_name = socket.gethostname().lower()
    if not is_loopback(name) and name not in (own_name, own_name.partition(".")[0]):
        raise _ResponseError(421, f"requests over the loopback name it as their host, or {own_name}: found {hosts}")


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled when the client disconnects."""
    task: asyncio.Future[Any] = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ResponseError(499, "the client disconnected")
        return task.result()
    finally:
        for future in (task, disconnect):
            future.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
