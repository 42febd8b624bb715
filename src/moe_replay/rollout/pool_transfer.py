"""One transfer of weights to several engines: its messages go to each of them."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol
from urllib.parse import urlsplit

from moe_replay.errors import EngineError
from moe_replay.rollout.engine import Engine
from moe_replay.rollout.types import Probe
from moe_replay.rollout.vllm.transfer_engines import EngineTransfer
from moe_replay.rollout.weights.transfer import Transfer, TransferError
from moe_replay.utils.messages import one_line

PAUSE_S = 1.0


class _Served(Engine, Protocol):
    url: str


def update_by_transfer(
    engines: Sequence[_Served], transfer: Transfer, version: int, probe: Probe | None, weights_id: str
) -> list[Future[None]]:
    """Update all engines at once and return how that ended for each; the messages are read in the caller's thread."""
    with ThreadPoolExecutor(len(engines) or 1) as threads:
        messages = [_Messages() for _ in engines]
        calls = {
            engine.url: threads.submit(each.update, engine, transfer, version, probe, weights_id)
            for each, engine in zip(messages, engines, strict=True)
        }
        gone = _Gone(calls)
        transfer.ended = lambda: _ended(calls) | gone.servers()
        _forward(transfer, messages)
    return list(calls.values())


def update_together(
    engines: Sequence[_Served], transfer: EngineTransfer, version: int, probe: Probe | None, weights_id: str
) -> list[Future[None]]:
    """Update all engines at once by a transfer that needs all of them, and return how that ended for each."""

    def update(engine: _Served) -> None:
        try:
            engine.update_weights(transfer, version, probe, weights_id)
        except EngineError as failure:
            transfer.end(f"{engine.url}: {one_line(failure)}")
            raise

    with ThreadPoolExecutor(len(engines) or 1) as threads:
        return [threads.submit(update, engine) for engine in engines]


class _Messages:
    """Messages on their way to one engine; None: the transfer broke off, or has ended."""

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.put = self._texts.put

    def update(self, engine: _Served, transfer: Transfer, version: int, probe: Probe | None, weights_id: str) -> None:
        """Update the engine by its part of the transfer."""
        own = Transfer({engine.url: transfer.for_engine(engine.url)}, self._read())
        engine.update_weights(own, version, probe, weights_id)

    def _read(self) -> Iterator[str]:
        whole = Transfer({}, iter(self._texts.get, None))
        yield from whole.messages_and_end()


def _ended(calls: dict[str, Future[None]]) -> dict[str, str]:
    """Return why the updates that have ended have."""
    done = {url: call.exception() for url, call in calls.items() if call.done()}
    return {url: "ended before it had all weights" if error is None else one_line(error) for url, error in done.items()}


class _Gone:
    """Servers whose process has ended: nothing listens on their port. A request that waits does not notice that."""

    def __init__(self, calls: dict[str, Future[None]]) -> None:
        self._calls = calls
        self._asked_at = time.monotonic()

    def servers(self) -> dict[str, str]:
        """Return those that refuse a connection; looks at most once in `PAUSE_S`."""
        if time.monotonic() - self._asked_at < PAUSE_S:
            return {}
        self._asked_at = time.monotonic()
        waiting = [url for url, call in self._calls.items() if not call.done()]
        return {url: "it has ended" for url in waiting if _refuses_connections(url)}


def _refuses_connections(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # it may be busy, or the network slow
        return False
    return False


def _forward(transfer: Transfer, messages: Sequence[_Messages]) -> None:
    """Read the messages, which sends the weights. If that fails no engine gets an end, and each says so itself."""
    try:
        for message in transfer.messages:
            for each in messages:
                each.put(message)
    except TransferError as failure:
        transfer.failure = failure
    finally:
        for each in messages:
            each.put(None)
