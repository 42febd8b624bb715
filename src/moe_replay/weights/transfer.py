"""Out-of-band weight transfer (CUDA IPC or NCCL): control messages, barrier store, broadcast group.

The request to an engine has the settings, one message per chunk, and an end message, which makes an update complete.
The bytes go through memory that both processes open (`ipc`) or a broadcast from the sender to all workers (`nccl`, over
gloo on CPUs), from each of several senders in turn where experts are divided among ranks. A store at the first sender
counts the workers that are ready and have read, and holds the first failure and the addresses of the group; it answers
connections that begin with a token from the request.
"""

from __future__ import annotations

import json
import queue
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.distributed.network import admitted, open_listener, port_of
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.utils.misc import one_line

if TYPE_CHECKING:
    from moe_replay.weights.messages import TransferSettings

END = '{"end":'
TOKEN_BYTES = 32
_ASK_S = 0.005
_FAILURE = "failure"
"""Key of the failure that has ended a transfer."""
PORT_CHECK_S = 1.0
"""Seconds between two checks whether a server that is being updated still listens."""
T = TypeVar("T")


class TransferError(EngineUnavailableError):
    """A transfer of weights that broke off: nothing that took part in it has the new weights."""


class Receivers(NamedTuple):
    """Workers of one engine that receive a transfer.

    device    type of the workers' devices
    ids       of their devices, one a worker (`staging.device_id`)
    opens     ids of the devices whose memory every worker can open; their own are not listed if they open no other
    """

    device: str
    ids: tuple[str, ...]
    opens: tuple[str, ...] = ()


@dataclass(slots=True)
class Transfer:
    """Weights for an engine's `update_weights` that do not come as tensors.

    settings   for each engine that takes part, by its URL; an engine of this process is ""
    messages   one a chunk, and the end; on the sender's side the chunk is sent when the next message is requested
    ended      set by the reader of the messages: returns the engines whose update has ended, and why
    failure    of the sender, where others than it raise
    """

    settings: Mapping[str, TransferSettings]
    messages: Iterable[str]
    ended: Callable[[], Mapping[str, str]] = field(default=dict)
    failure: TransferError | None = None

    def for_engine(self, url: str) -> TransferSettings:
        settings = self.settings.get(url)
        if settings is None:
            raise EngineUnavailableError(f"{url} could not be reached when the transfer of weights began")
        return settings

    def messages_and_end(self) -> Iterator[str]:
        """Yield all messages; raise unless the last is the end of the chunks before it."""
        count = 0
        for message in self.messages:
            yield message
            if message == end_message(count):
                return
            count += 1
        raise TransferError("the sender of the weights broke off", found=f"after {count} chunks")

    def chunk_messages(self) -> Iterator[str]:
        """Yield the messages of all chunks; raise unless the end follows them."""
        return (message for message in self.messages_and_end() if not message.startswith(END))


def drive(transfer: Transfer, call: Callable[[str, str], Future[None]]) -> None:
    """Have the workers of one engine take part in a transfer.

    call   starts a method of all workers with one argument; it must not block, since the sender may be this thread
    """
    pending = call("replay_join", transfer.for_engine("").model_dump_json())
    transfer.ended = lambda: {"": str(pending.exception())} if pending.done() and pending.exception() else {}
    try:
        for message in transfer.chunk_messages():
            pending.result()
            pending = call("replay_receive", message)
    except TransferError:
        if pending.done():
            pending.result()  # says why the transfer broke off
        raise
    pending.result()


def end_message(chunks: int) -> str:
    """Return the message that follows the last chunk."""
    return f"{END}{chunks}}}"


# ---- one transfer to several servers ---------------------------------------------------------------------------------


def forward_messages(
    engines: Mapping[str, T], transfer: Transfer, update: Callable[[T, Transfer], None]
) -> dict[str, Future[None]]:
    """Update all servers by one transfer; return the outcome of each, by URL.

    Reading a message sends the weights, so it is done in the caller's thread. If that fails no server gets the end
    message, and each reports the broken transfer itself.
    """
    with ThreadPoolExecutor(len(engines) or 1) as threads:
        queues: dict[str, queue.SimpleQueue[str | None]] = {url: queue.SimpleQueue() for url in engines}
        calls = {
            url: threads.submit(update, engine, Transfer({url: transfer.for_engine(url)}, _messages(queues[url])))
            for url, engine in engines.items()
        }
        ports = _PortCheck(calls)
        transfer.ended = lambda: _finished(calls) | ports.closed()
        try:
            for message in transfer.messages:
                for texts in queues.values():
                    texts.put(message)
        except TransferError as failure:
            transfer.failure = failure
        finally:
            for texts in queues.values():
                texts.put(None)
    return calls


def _messages(texts: queue.SimpleQueue[str | None]) -> Iterator[str]:
    """Yield the messages for one server; None: the transfer broke off, or has ended."""
    yield from Transfer({}, iter(texts.get, None)).messages_and_end()


def _finished(calls: Mapping[str, Future[None]]) -> dict[str, str]:
    """Return the error of each finished update, by URL."""
    done = {url: call.exception() for url, call in calls.items() if call.done()}
    return {url: "ended before it had all weights" if error is None else one_line(error) for url, error in done.items()}


class _PortCheck:
    """Finds servers whose process has died during an update: a request that waits does not notice it, but their port
    refuses connections."""

    def __init__(self, calls: Mapping[str, Future[None]]) -> None:
        self._calls = calls
        self._checked_at = time.monotonic()

    def closed(self) -> dict[str, str]:
        """Return the servers that refuse a connection; checks at most once in `PORT_CHECK_S`."""
        if time.monotonic() - self._checked_at < PORT_CHECK_S:
            return {}
        self._checked_at = time.monotonic()
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


# ---- store ----------------------------------------------------------------------------------------------------------


class _StoreServer:
    """A store of this process for connections that begin with a token; torch's own store answers everyone."""

    def __init__(self, host: str) -> None:
        self.store, self.token = dist.HashStore(), secrets.token_hex(TOKEN_BYTES)
        listener = open_listener(host)
        self.port = port_of(listener)
        arguments = (listener, self.token.encode(), self.store)
        threading.Thread(target=_admit, args=arguments, name="transfer store", daemon=True).start()
        weakref.finalize(self, listener.close)


def _admit(listener: socket.socket, token: bytes, store: dist.Store) -> None:
    with suppress(OSError, ValueError):  # closed before this thread began
        for connection, _ in admitted(listener, token):
            threading.Thread(target=_answer, args=(connection, store), name="transfer", daemon=True).start()


_CALLS = ("set", "get", "add", "check", "delete_key", "num_keys")


def _answer(connection: socket.socket, store: dist.Store) -> None:
    """Make the calls that come over a connection, one JSON line each, until it is closed."""
    with connection, suppress(OSError, ValueError), connection.makefile("rb") as lines:
        for line in lines:
            name, *arguments = json.loads(line)
            if name not in _CALLS:
                return
            if name == "set":
                arguments[1] = arguments[1].encode("latin-1")
            result = getattr(store, name)(*arguments)
            result = result.decode("latin-1") if isinstance(result, bytes) else result
            connection.sendall(json.dumps(result).encode() + b"\n")


class _RemoteStore(dist.Store):
    """The store of a `_StoreServer`, over one connection. torch calls these methods too; bytes travel as Latin-1."""

    def __init__(self, host: str, port: int, token: str, timeout_s: float) -> None:
        super().__init__()
        self._lock, self._timeout_s = threading.Lock(), timeout_s
        try:
            self._connection = socket.create_connection((host, port), timeout_s)
            self._connection.sendall(token.encode())
        except OSError as failure:
            raise dist.DistNetworkError(str(failure)) from failure
        self._lines = self._connection.makefile("rb")
        self.num_keys()  # fails without the token

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            with self._lock:
                self._connection.sendall(json.dumps([name, *arguments]).encode() + b"\n")
                line = self._lines.readline()
        except OSError as failure:
            raise dist.DistNetworkError(str(failure)) from failure
        if not line.endswith(b"\n"):
            raise dist.DistNetworkError("the connection was closed")
        return json.loads(line)

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else value
        self._call("set", key, content.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Return a value; wait until it is set."""
        self.wait([key])
        return self._call("get", key).encode("latin-1")

    def add(self, key: str, value: int) -> int:
        return self._call("add", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call("check", list(keys))

    def delete_key(self, key: str) -> bool:
        return self._call("delete_key", key)

    def num_keys(self) -> int:
        return self._call("num_keys")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set; ask for them in between, so that no call waits at the server.

        A transfer that has failed ends the wait: a thread that waits for the end of the process could crash it.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if self.check([_FAILURE]):
                raise dist.DistStoreError("the transfer has failed")
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"not set in time: {', '.join(keys)}")
            time.sleep(_ASK_S)


class TransferStore:
    """Counters and the first failure of a transfer, kept by its sender and shared by all participants.

    Every wait also ends when the transfer has failed, or the sender is gone.

    store     of this process, or a connection to it
    token     that everyone who takes part has
    connect   returns the store over a separate connection
    """

    def __init__(
        self,
        store: dist.Store,
        address: tuple[str, int],
        token: str,
        timeout_s: float,
        connect: Callable[[], dist.Store],
    ) -> None:
        self.host, self.port = address
        self.token, self.timeout_s = token, timeout_s
        self.store, self.connect_again = store, connect

    @classmethod
    def listen(cls, host: str, timeout_s: float) -> TransferStore:
        """Open a store on a free port of an address of this machine; a connection without the token is closed."""
        server = _StoreServer(host)
        return cls(server.store, (host, server.port), server.token, timeout_s, lambda: server.store)

    @classmethod
    def connect(cls, host: str, port: int, token: str, timeout_s: float) -> TransferStore:
        def connect() -> dist.Store:
            return _RemoteStore(host, port, token, timeout_s)

        try:
            return cls(connect(), (host, port), token, timeout_s, connect)
        except (dist.DistError, RuntimeError) as failure:
            raise TransferError("the sender of the weights cannot be reached", found=f"{host}:{port}") from failure

    @classmethod
    def listen_by_torch(cls, host: str, timeout_s: float) -> TransferStore:
        """Open torch's own store, for engines that connect to that: it answers everyone."""
        limit = timedelta(seconds=timeout_s)
        with open_listener(host) as listener:
            port, file = port_of(listener), listener.detach()
        server = dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=file)
        token = secrets.token_hex(TOKEN_BYTES)
        return cls(
            dist.PrefixStore(token, server),
            (host, port),
            token,
            timeout_s,
            lambda: dist.TCPStore(host, port, None, False, limit),
        )

    def add(self, key: str, number: int = 1) -> int:
        with _sender_alive():
            return self.store.add(key, number)

    def put(self, key: str, text: str) -> None:
        with _sender_alive():
            self.store.set(key, text)

    def get(self, key: str) -> str | None:
        """Return a text; None if it is not set yet."""
        with _sender_alive():
            return self.store.get(key).decode() if self.store.check([key]) else None

    def fail(self, text: str, worker: int | None = None) -> None:
        """Note a failure that ends the transfer for all; the first one counts."""
        if self.add("failures") == 1:
            self.put(_FAILURE, json.dumps({"text": text, "worker": worker}))

    def failure(self) -> dict[str, Any] | None:
        failure = self.get(_FAILURE)
        return None if failure is None else json.loads(failure)

    def check(self) -> None:
        """Raise if the transfer has failed."""
        failure = self.failure()
        if failure is not None:
            raise TransferError(f"the transfer of weights broke off: {failure['text']}")

    def wait(self, done: Callable[[], bool], doing: str, check: Callable[[], None] | None = None) -> None:
        """Return when `done`; raise if the transfer fails, or nothing happens for too long.

        check   called now and then; may raise
        """
        deadline, checked_at, pause_s = time.monotonic() + self.timeout_s, 0.0, 5e-5
        while not done():
            now = time.monotonic()
            if now - checked_at > 0.05:
                checked_at = now
                self.check()
                if check is not None:
                    check()
            if now > deadline:
                raise TransferError(f"nothing happened for {self.timeout_s:g} s while {doing}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 2e-3)

    def close(self) -> None:
        """Drop the connection, or the server."""
        del self.store, self.connect_again


@contextmanager
def _sender_alive() -> Iterator[None]:
    """Turn the errors of a store whose sender is gone into ours."""
    try:
        yield
    except EngineError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise TransferError("the sender of the weights is gone", found=str(error).splitlines()[0]) from error


class BroadcastGroup:
    """Sender and workers of a transfer as one group of torch.distributed, apart from other groups of their processes.

    rank       the senders come first
    prefixes   of its keys in the store, the first next to the store; None: the transfer's own
    """

    def __init__(
        self,
        store: TransferStore,
        rank: int,
        size: int,
        device: str,
        prefixes: Sequence[str] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        self._kept: dist.Store | None = None  # the group calls it, and does not keep it alive
        limit = timedelta(seconds=store.timeout_s)
        group: Future[Any] = Future()

        def connect() -> None:
            # A separate connection: a store that waits for a member answers nothing else.
            try:
                prefixed = self._kept = store.connect_again()
                for prefix in prefixes or ("group",):
                    prefixed = dist.PrefixStore(prefix, prefixed)
                if device == "cuda":
                    options = dist.ProcessGroupNCCL.Options()
                    options._timeout = limit
                    group.set_result(dist.ProcessGroupNCCL(prefixed, rank, size, options))
                else:
                    group.set_result(dist.ProcessGroupGloo(prefixed, rank, size, limit))
            except (dist.DistError, RuntimeError) as failure:
                group.set_exception(failure)

        # Gloo waits until every member has connected. If one has died, that takes the whole limit: not in this thread.
        threading.Thread(target=connect, name="broadcast group", daemon=True).start()
        store.wait(group.done, "sender and workers connected to each other", check)
        if group.exception() is not None:
            store.check()  # a failure of the transfer ends the thread too, and says more
        with _sender_alive():
            self._group: Any = group.result()

    def broadcast(self, content: Tensor, check: Callable[[], None] | None = None, root: int = 0) -> None:
        """Send a tensor as the root, or receive it; return when this process is done with it."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        with _sender_alive():
            work = self._group.broadcast([content], options)
            self._store.wait(work.is_completed, "the weights were on their way", check)
            work.wait()
            if content.is_cuda:
                torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """End the group; what is on its way in it is lost."""
        self._group.abort()
