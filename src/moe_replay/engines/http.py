"""Base of the HTTP clients: bounded concurrency, timeouts, a bearer token, and typed errors."""

from __future__ import annotations

import asyncio
import json as json_format
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from moe_replay.engines.base import ServedEngine
from moe_replay.engines.event_loop import AsyncSampler
from moe_replay.engines.requests import (
    DIGEST_HEADER,
    LOWEST_LOGPROB,
    EngineState,
    RequestBarrier,
    content_digest,
    first_impossible,
)
from moe_replay.errors import EngineAnswerError, EngineError, EngineUnavailableError, MoeReplayError
from moe_replay.interop.capture import is_unrouted
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.misc import one_line
from moe_replay.utils.secrets import MASK, mask_passwords
from moe_replay.weights.identity import CurrentWeights, WeightsLedger, parse_version_text, version_text

_RETRYABLE = (429, 502, 503, 504)


class HttpClient(AsyncSampler, ServedEngine):
    """A client of a server that samples.

    url              of the server, e.g. http://127.0.0.1:8000; a user and password in it are sent, and shown as ***
    token            sent as bearer token
    max_concurrent   concurrent requests at most; others wait in the client
    timeout          seconds for one request, from the first byte sent to the last byte received
    vocab_size       of the model, where known: samples with other tokens are refused
    max_answer_bytes   of one response
    """

    vocab_size: int | None
    _ledger: WeightsLedger
    """Of the weights that the server was sent."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        max_concurrent: int = 64,
        timeout: float = 600.0,
        vocab_size: int | None = None,
        max_answer_bytes: int = 2**32,
    ) -> None:
        # The URL that errors and logs show has no password.
        self.url = mask_passwords(url.rstrip("/"))
        super().__init__(f"client of {self.url}")
        address = httpx.URL(url.rstrip("/"))
        auth = httpx.BasicAuth(address.username, address.password) if address.userinfo else None
        self._secrets = [secret for secret in (token, address.password) if secret]
        headers = {"authorization": f"Bearer {token}"} if token else {}
        timeouts = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        limits = httpx.Limits(max_connections=max_concurrent + 4, max_keepalive_connections=max_concurrent + 4)
        options: dict[str, Any] = {
            "base_url": address.copy_with(userinfo=b""),
            "auth": auth,
            "headers": headers,
            "timeout": timeouts,
            "trust_env": False,
        }
        self._async = httpx.AsyncClient(**options, limits=limits)
        self._sync = httpx.Client(**options)
        self._semaphore = asyncio.Semaphore(max_concurrent)
        self._timeout = timeout
        self.vocab_size = vocab_size
        self._max_answer_bytes = max_answer_bytes

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        async with self._semaphore:
            return await self._read_samples(self._sample(prompt, params), prompt, params)

    async def _read_samples(
        self, request: Awaitable[list[Sample]], prompt: Sequence[int], params: SamplingParams
    ) -> list[Sample]:
        """Return the samples of a request; raise `EngineAnswerError` if the server's answer cannot be used."""
        with reading_answer(self.url):
            samples = await request
            if "topology" not in vars(self):  # fetched by a blocking call, so not in this loop
                await asyncio.to_thread(lambda: self.topology)
            check_samples(samples, prompt, params, url=self.url, topology=self.topology, vocab_size=self.vocab_size)
        return [replace(sample, server=self.url) for sample in samples]

    @abstractmethod
    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Send one request to the server."""

    async def _post(self, path: str, content: object) -> httpx.Response:
        """Send a request in the client's own loop."""
        try:
            async with asyncio.timeout(self._timeout), self._async.stream("POST", path, json=content) as response:
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    self._check_size(len(body))
                return self._checked(_whole(response, bytes(body)))
        except (httpx.HTTPError, TimeoutError) as failure:
            raise self._unavailable(failure) from failure

    def _call(
        self,
        method: str,
        path: str,
        *,
        json: object = None,
        body: Iterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Send a request in the caller's thread and return the JSON of the response."""
        try:
            with self._sync.stream(method, path, json=json, content=body, headers=headers) as response:
                received, begun = bytearray(), time.monotonic()
                for chunk in response.iter_bytes():
                    received += chunk
                    self._check_size(len(received))
                    if time.monotonic() - begun > self._timeout:
                        raise httpx.ReadTimeout(f"no whole answer within {self._timeout:g} s")
                answer = self._checked(_whole(response, bytes(received)))
        except httpx.HTTPError as failure:
            raise self._unavailable(failure) from failure
        with reading_answer(f"{self.url}{path}"):
            return answer.json()

    def _check_size(self, size: int) -> None:
        if size > self._max_answer_bytes:
            raise EngineAnswerError(
                f"{self.url} returned more than a response may have",
                expected=f"at most {self._max_answer_bytes} bytes (max_answer_bytes)",
            )

    def follow_update(self, version: int, weights_id: str) -> None:
        self._ledger.record(version, weights_id)

    def _check_taken(self, reported: CurrentWeights, version: int, weights_id: str) -> None:
        """Raise unless a server that has answered an update reports its weights."""
        if reported != (version, weights_id):
            raise EngineAnswerError(
                f"{self.url} answered an update of its weights and does not have them",
                expected=version_text(version, weights_id),
                found=version_text(*reported),
                remedy="Somebody else updates it, or a proxy does not pass requests on",
            )

    def healthy(self) -> bool:
        try:
            return self._sync.get("/health", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def _unavailable(self, failure: Exception) -> EngineUnavailableError:
        why = self._without_secrets(str(failure)) or "timed out"
        return EngineUnavailableError(f"{self.url} cannot be reached: {type(failure).__name__}: {why}")

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            check_digest(response.content, response.headers.get(DIGEST_HEADER), self.url)
            return response
        kind = EngineUnavailableError if response.status_code in _RETRYABLE else EngineError
        raise kind(
            f"{self.url} refused {response.request.url.path}: {self._without_secrets(_error_message(response))}",
            found=response.status_code,
        )

    def _without_secrets(self, text: str) -> str:
        """Return a text without the token and the password, which a proxy may quote in an error."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        self._sync.close()
        if not self._loop.loop.is_closed():
            self._loop.run(self._async.aclose())
        super().close()


class ForeignClient(HttpClient):
    """A client of another project's own server, which keeps one text as the version of its weights.

    project          that the server is of, for errors
    weight_version   of the weights that the server was started with
    """

    # vLLM before 0.32 is asked for the version of a sample after its request; a request that waits in SGLang would be
    # sampled by weights that are not verified yet.
    drains = True

    def __init__(self, project: str, url: str, token: str | None, weight_version: int, limits: dict[str, Any]) -> None:
        super().__init__(url, token=token, **limits)
        self._first_version = weight_version
        self._state = EngineState(f"{project} at {self.url}", weight_version)
        self._ledger = WeightsLedger(self._state.engine)
        self._barrier = RequestBarrier(self._loop.loop)

    def _parse_version(self, text: str) -> CurrentWeights:
        """Read a version text: `default` until the first update, then what the update sent."""
        return parse_version_text(text, self._first_version, self._state.engine)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        self._state.require_ready()
        return self._prompt_logprobs(token_ids)

    @abstractmethod
    def _prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the log-probs of `prompt_logprobs`, in the middle of an update too."""

    def _command(self, path: str, content: object = None) -> None:
        """Send a request and wait for its success; the answer may have no content."""
        self._loop.run(self._post(path, content or {}))


@contextmanager
def between(post: Callable[[str, object], Any], begin: str, end: str, content: object = None) -> Iterator[None]:
    """Post `begin` before the context and `end` after it, also where it fails: the server would refuse what follows."""

    def end_after_error() -> None:
        with suppress(EngineError):  # what went wrong before says more
            post(end, None)

    post(begin, content)
    with ExitStack() as undo:
        undo.callback(end_after_error)
        yield
        undo.pop_all()
    post(end, None)


def _whole(response: httpx.Response, body: bytes) -> httpx.Response:
    """Return a streamed response with its body, decoded already."""
    kept = {name: response.headers[name] for name in ("content-type", DIGEST_HEADER) if name in response.headers}
    return httpx.Response(response.status_code, headers=kept, content=body, request=response.request)


def _error_message(response: httpx.Response) -> str:
    """Return the message of an error response, in any of the usual JSON forms or as text."""
    try:
        body = response.json()
    except (ValueError, RecursionError):
        return response.text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]


# ---- answers of a server ---------------------------------------------------------------------------------------------


@contextmanager
def reading_answer(url: str) -> Iterator[None]:
    """Raise `EngineAnswerError` for whatever fails while a server's answer is parsed; engine errors pass through."""
    try:
        yield
    except EngineError:
        raise
    except (MoeReplayError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        kind = "" if isinstance(error, MoeReplayError) else f"{type(error).__name__}: "
        raise EngineAnswerError(f"{url} returned an answer that cannot be read: {kind}{one_line(error)}") from error


def check_samples(
    samples: Sequence[Sample],
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    url: str,
    topology: MoeTopology,
    vocab_size: int | None,
) -> None:
    """Raise unless these can be the samples of a prompt.

    vocab_size   of the model; None: not known, and only ids that no model has are refused
    """
    if len(samples) != params.n:
        raise EngineAnswerError(f"{url} returned another number of samples", expected=params.n, found=len(samples))
    ids = np.asarray(prompt, np.int64)
    for index, sample in enumerate(samples):
        problem = _problem(sample, ids, params, topology, vocab_size)
        if problem:
            description, expected, found = problem
            raise EngineAnswerError(f"{url} returned {description}", sample=index, expected=expected, found=found)


def _problem(
    sample: Sample, prompt: np.ndarray, params: SamplingParams, topology: MoeTopology, vocab_size: int | None
) -> tuple[str, object, object] | None:
    """Return (problem, expected, found) of a sample that cannot be true."""
    completion, logprobs, trace = sample.completion_ids, sample.logprobs, sample.trace
    if not np.array_equal(sample.prompt_ids, prompt):
        return "a sample of another prompt", f"{len(prompt)} tokens as sent", f"{len(sample.prompt_ids)} tokens"
    if len(completion) > params.max_tokens:
        return "more tokens than requested", f"at most {params.max_tokens}", len(completion)
    if not len(completion) and sample.finish_reason is not FinishReason.ABORT:
        return "a sample without tokens that was not aborted", "at least one token", sample.finish_reason.value
    if len(completion) == params.max_tokens and sample.finish_reason is FinishReason.ABORT:
        return "a sample of full length as aborted", f"fewer than {params.max_tokens} tokens", len(completion)
    largest = vocab_size if vocab_size is not None else 2**31
    beyond = np.flatnonzero((completion < 0) | (completion >= largest))
    if beyond.size:
        return "a token that the model does not have", f"ids below {largest}", int(completion[beyond[0]])
    if (impossible := first_impossible(logprobs)) is not None:
        return "an impossible log-prob", f"from {LOWEST_LOGPROB:g} to 0", impossible
    mask = sample.sampling_mask
    if params.sampling_mask and mask is None and len(completion):
        return "a sample without its sampling mask", "the support of each token", "no mask"
    if mask is not None and vocab_size is not None and mask.vocab_size != vocab_size:
        return "a sampling mask of another vocabulary", f"{vocab_size} tokens", f"{mask.vocab_size} tokens"
    if not params.routes and is_unrouted(trace):
        return None
    if (trace.layers, trace.top_k) != (topology.layers, topology.top_k) or (
        trace.num_experts is not None and trace.num_experts > topology.num_experts
    ):
        return "routes of another model", f"layers {topology.layers}, top {topology.top_k}", trace
    return None


def check_digest(body: bytes, header: str | None, url: str) -> None:
    """Raise if a body does not have the digest of its header; other digests than ours are not checked."""
    if header and header.startswith("sha-256=") and header != content_digest(body):
        raise EngineAnswerError(f"{url} returned a body that was corrupted on its way", expected=header)


def vocabulary_size(model: str) -> int | None:
    """Return the vocabulary size in the config.json of a model folder; None if there is none."""
    try:
        config = json_format.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None
