"""Requests to an engine: when they may run, what they may contain, their seeds and how they end.

Imports neither numpy nor torch at the top: `moe-replay rollout --help` reads `RequestLimits`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_replay.errors import EngineError, EngineName

if TYPE_CHECKING:
    import numpy as np

    from moe_replay.records import FinishReason, SamplingParams

ROUNDING = 1e-3  # log-probs may exceed 0 by this much: engines subtract two large numbers
LOWEST_LOGPROB = -80.0  # of a sampled token: a token of probability 1e-35 is never sampled, and its ratios are finite
DIGEST_HEADER = "content-digest"


class RequestBarrier:
    """Gate for engine requests: they run while it is open; a weight update closes it and has the engine to itself.

    It is bound to one event loop, which need not have started.

    active   ids of the running requests
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.active: set[str] = set()
        self._loop = loop
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._request_ended = asyncio.Condition()
        self._ids = itertools.count()

    @asynccontextmanager
    async def request(self, kind: str = "request") -> AsyncIterator[str]:
        """Wait until the barrier is open, then run a request; yields its id, which begins with its kind."""
        await self.wait_until_open()
        request_id = self.new_request_id(kind)
        self.active.add(request_id)
        try:
            yield request_id
        finally:
            self.active.discard(request_id)
            async with self._request_ended:
                self._request_ended.notify_all()

    def new_request_id(self, kind: str = "request") -> str:
        return f"{kind} {next(self._ids)}"

    async def close(self, abort: Callable[[], Awaitable[None]]) -> None:
        """Hold new requests back and abort the running ones; return when none is running."""
        await self.wait_until_open()
        self._is_open.clear()
        with self.open_on_error():
            while self.active:
                await abort()  # repeated: a request may have been on its way to the engine, and unknown there
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2), self._request_ended:
                        await self._request_ended.wait()

    def shut(self) -> None:
        """Hold new requests back; running ones continue. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._is_open.clear)

    def open(self) -> None:
        """Let waiting requests run; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._is_open.set)

    @contextmanager
    def open_on_error(self) -> Iterator[None]:
        """Open the barrier if the block raises, so that waiting requests run and see the error state."""
        with ExitStack() as undo:
            undo.callback(self.open)
            yield
            undo.pop_all()

    async def wait_until_open(self) -> None:
        while not self._is_open.is_set():  # a task that was woken first may have closed it again
            await self._is_open.wait()


class EngineState:
    """The weight version of an engine, and whether it may sample: it is awake, and all weights are of one version."""

    def __init__(self, engine: str, weight_version: int) -> None:
        self.engine = engine
        self.weight_version = weight_version
        self.weights_id = ""
        self.weights_complete = True
        self.asleep = False

    def require_ready(self) -> None:
        if not self.weights_complete:
            raise EngineError(
                f"{self.engine} has weights of an update that did not succeed",
                expected=f"weights of one version (the last was {self.weight_version})",
                remedy="Repeat update_weights with all weights",
            )
        if self.asleep:
            raise EngineError(f"{self.engine} is asleep", remedy="Call wake() before sampling")

    @contextmanager
    def update_to(self, version: int, weights_id: str = "") -> Iterator[None]:
        """Replace the weights in this block; they are those of `version` only if it succeeds."""
        self.begin_update()
        yield
        self.end_update(version, weights_id)

    def begin_update(self) -> None:
        """Mark the weights as incomplete: they are of no version until `end_update`."""
        self.weights_complete = False

    def end_update(self, version: int, weights_id: str = "") -> None:
        self.weight_version, self.weights_id, self.weights_complete = version, weights_id, True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits on the requests of one client of a rollout server, in size and time; larger ones get an error."""

    max_samples: int = 1024
    """Maximum samples per request."""
    max_json_bytes: int = 2**26
    """Maximum size of a request body in bytes, weights excepted."""
    max_connections: int = 4096
    """Maximum open connections; more are closed."""
    header_s: float = 20.0
    """Timeout for the headers of a request in seconds."""
    body_s: float = 60.0
    """Timeout for the body of a request in seconds; for weights, from one chunk to the next."""
    update_s: float = 3600.0
    """Timeout for the whole body of a weight update in seconds."""

    def check(self, token_ids: Sequence[int], params: SamplingParams | None, vocab_size: int | None) -> None:
        """Raise if a request would harm the engine.

        vocab_size   of the model; None: not known, and only ids that no model has are refused
        """
        check_token_ids(token_ids, vocab_size)
        if params is None:
            return
        check_token_ids(params.stop_token_ids, vocab_size, "a stop token")
        if params.n > self.max_samples:
            raise EngineError(
                "more samples than one request may have", expected=f"n at most {self.max_samples}", found=params.n
            )


def check_token_ids(token_ids: Sequence[int], vocab_size: int | None, subject: str = "a token of the prompt") -> None:
    """Raise for a token id outside the vocabulary, which kills some engines."""
    limit = 2**31 if vocab_size is None else vocab_size
    if len(token_ids) and not 0 <= min(token_ids) <= max(token_ids) < limit:
        token_id = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise EngineError(f"{subject} is not in the model's vocabulary", expected=f"0 <= id < {limit}", found=token_id)


def per_prompt(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of each of the `count` prompts of a call, with its own seed in `seed`."""
    if not params.seeds:
        return [params] * count
    if len(params.seeds) != count:
        raise EngineError("a call needs one seed per prompt", expected=count, found=len(params.seeds))
    return [replace(params, seed=seed, seeds=()) for seed in params.seeds]


def request_seed(params: SamplingParams, prompt: Sequence[int]) -> int | None:
    """Return the seed of one prompt's request; None if `params` has none. Equal prompts have equal seeds."""
    return None if params.seed is None else params.seed ^ prompt_hash(prompt)


def prompt_hash(prompt: Sequence[int]) -> int:
    """Return a hash of a prompt to mix into a seed: one seed must not draw the same numbers for all prompts."""
    return zlib.crc32(array("i", prompt).tobytes())


def parse_finish_reason(reason: str | None, engine: EngineName, sample: int) -> FinishReason:
    """Return why an engine ended a sample; an unknown reason is an error."""
    from moe_replay.records import FinishReason

    if reason not in tuple(FinishReason):
        raise EngineError(
            f"{engine} ended a sample for an unknown reason",
            sample=sample,
            expected=", ".join(FinishReason),
            found=reason,
        )
    return FinishReason(reason)


def sampled_version(spans: Sequence[Mapping[str, str]] | None, engine: str, sample: int) -> str | None:
    """Return the version text of the weights that sampled a completion; None: the server does not say.

    spans   of tokens with one version each, as SGLang and vLLM (0.32) return them
    """
    versions = {span["version"] for span in spans or ()}
    if len(versions) > 1:
        raise EngineError(
            f"{engine} sampled one completion from several weight versions",
            sample=sample,
            found=sorted(versions),
            remedy="Updates must pause it with mode=abort, as update_weights does here; somebody else updates it",
        )
    return next(iter(versions), None)


def first_impossible(logprobs: np.ndarray) -> float | None:
    """Return the first of these (C,) that no sampled token can have; None if there is none."""
    impossible = ~((logprobs >= LOWEST_LOGPROB) & (logprobs <= ROUNDING))  # NaN is neither
    return float(logprobs[impossible][0]) if impossible.any() else None


def content_digest(body: bytes) -> str:
    """Return the value of the header `Content-Digest` (RFC 9530) for a body."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"
