"""Base of the HTTP clients: bounded concurrency, timeouts, a bearer token, and typed errors."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import httpx

from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.rollout.loop import AsyncSampler
from moe_replay.rollout.types import Sample, SamplingParams

_RETRYABLE = (429, 502, 503, 504)


class HttpClient(AsyncSampler):
    """A client of a server that samples.

    url              of the server, e.g. http://127.0.0.1:8000
    token            sent as bearer token
    max_concurrent   concurrent requests at most; others wait in the client
    timeout          seconds for one request, from the first byte sent to the last byte received
    """

    def __init__(self, url: str, *, token: str | None = None, max_concurrent: int = 64, timeout: float = 600.0) -> None:
        super().__init__(f"client of {url}")
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        timeouts = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        limits = httpx.Limits(max_connections=max_concurrent + 4, max_keepalive_connections=max_concurrent + 4)
        options: dict[str, Any] = {"base_url": self.url, "headers": headers, "timeout": timeouts, "trust_env": False}
        self._async = httpx.AsyncClient(**options, limits=limits)
        self._sync = httpx.Client(**options)
        self._semaphore = asyncio.Semaphore(max_concurrent)
        self._timeout = timeout

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt; runs in the client's own loop."""
        async with self._semaphore:
            return await self._sample(prompt, params)

    @abstractmethod
    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Send one request to the server."""

    async def _post(self, path: str, content: object) -> httpx.Response:
        """Send a request in the client's own loop."""
        try:
            async with asyncio.timeout(self._timeout):
                return self._checked(await self._async.post(path, json=content))
        except (httpx.TransportError, TimeoutError) as failure:
            raise self._unavailable(failure) from failure

    def _call(self, method: str, path: str, *, json: object = None, body: Iterable[bytes] | None = None) -> Any:
        """Send a request in the caller's thread and return the JSON of the response."""
        try:
            return self._checked(self._sync.request(method, path, json=json, content=body)).json()
        except httpx.TransportError as failure:
            raise self._unavailable(failure) from failure

    def healthy(self) -> bool:
        """Whether the server responds and its engine is alive."""
        try:
            return self._sync.get("/health", timeout=5.0).is_success
        except httpx.TransportError:
            return False

    def _unavailable(self, failure: Exception) -> EngineUnavailableError:
        why = str(failure) or "timed out"
        return EngineUnavailableError(f"{self.url} cannot be reached: {type(failure).__name__}: {why}")

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        kind = EngineUnavailableError if response.status_code in _RETRYABLE else EngineError
        raise kind(
            f"{self.url} refused {response.request.url.path}: {_error_message(response)}", found=response.status_code
        )

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._sync.close()
        if not self._loop.loop.is_closed():
            self._loop.run(self._async.aclose())
        super().close()


def _error_message(response: httpx.Response) -> str:
    """Return the message of an error response, in any of the usual JSON forms or as text."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
