"""Limits on the requests of one client of a rollout server, in size and in time; larger ones get an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_replay.errors import EngineError

if TYPE_CHECKING:
    from moe_replay.rollout.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of a server.

    max_samples       samples of one request
    max_json_bytes    body of a request, weights excepted
    max_connections   open connections; more are closed
    header_s          seconds for the headers of a request
    body_s            seconds for the body of a request; of weights, from one chunk to the next
    update_s          seconds for the whole body of a weight update
    """

    max_samples: int = 1024
    max_json_bytes: int = 2**26
    max_connections: int = 4096
    header_s: float = 20.0
    body_s: float = 60.0
    update_s: float = 3600.0

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
                "more samples than one request may ask for", expected=f"n at most {self.max_samples}", found=params.n
            )


def check_token_ids(token_ids: Sequence[int], vocab_size: int | None, what: str = "a token of the prompt") -> None:
    """Raise if the model does not have one of these tokens: some engines die of it."""
    largest = 2**31 if vocab_size is None else vocab_size
    if len(token_ids) and not 0 <= min(token_ids) <= max(token_ids) < largest:
        found = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise EngineError(f"{what} is not in the model's vocabulary", expected=f"0 <= id < {largest}", found=found)


def timed_protocol(limits: RequestLimits) -> type[Any]:
    """Return uvicorn's HTTP protocol that closes connections beyond the limits: too many, or too slow with headers."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol

    class TimedProtocol(Protocol):  # type: ignore[misc, valid-type]
        """One connection; `cycle` is uvicorn's request that is being answered, from its headers on."""

        _timer: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()
            if len(self.connections) > limits.max_connections:
                transport.abort()

        def data_received(self, data: bytes) -> None:
            if not self._answering():
                self._start_timer()
            super().data_received(data)
            if self._answering():
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _start_timer(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(limits.header_s, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return TimedProtocol
