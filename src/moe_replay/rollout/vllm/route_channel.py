"""The way of captured routes from vLLM's workers to the engine: shared memory, announced over a Unix socket.

Each message names the requests that have ended and carries an anonymous file (memfd) with the rows of all of them. Only
the socket has a name in a file system, so nothing is left behind when a process is killed.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from moe_replay.errors import EngineUnavailableError
from moe_replay.rollout.vllm.slot_routes import EndedRequest
from moe_replay.utils.device import device_module

UNROUTED = "unrouted"
"""In the id of a request whose routes nobody asks for."""
_REQUESTS_A_MESSAGE = 256
_MESSAGE_BYTES = 2**17
_INTERNAL_ID = re.compile(r"(?:(?P<index>\d+)_)?(?P<request_id>.*?)(?:-[0-9a-f]{8})?")


def wants_routes(request_id: str) -> bool:
    """Return whether the routes of a request are sent to the engine."""
    return UNROUTED not in request_id


class RouteSender:
    """The worker's end: sends in a separate thread, after the copy from the device has arrived."""

    def __init__(self, path: str, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._waiting: queue.SimpleQueue[tuple[Sequence[EndedRequest], Tensor, Callable[[], None]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._send_all, name="routes", daemon=True).start()

    def send(self, ended: Sequence[EndedRequest], rows: Tensor) -> None:
        """Send the rows of ended requests, (blocks, block size, layers * K), in the background."""
        if rows.device.type == "cpu":
            self._waiting.put((ended, rows, _nothing))
            return
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        host.copy_(rows, non_blocking=True)
        copied = device_module(rows.device).Event()
        copied.record()
        self._waiting.put((ended, host, copied.synchronize))

    def _send_all(self) -> None:
        while True:
            ended, rows, wait = self._waiting.get()
            wait()
            data = rows.numpy()
            sent = 0
            try:
                for first in range(0, len(ended), _REQUESTS_A_MESSAGE):
                    some = ended[first : first + _REQUESTS_A_MESSAGE]
                    blocks = sum(one.blocks for one in some)
                    self._send(some, data[sent : sent + blocks])
                    sent += blocks
            except OSError:  # the engine has closed its end
                return

    def _send(self, ended: Sequence[EndedRequest], rows: np.ndarray) -> None:
        header = {
            "dtype": f"u{rows.itemsize}",
            "shape": [rows.shape[1], *self._shape],
            "requests": [(one.request_id, one.final, one.complete, one.blocks) for one in ended],
        }
        file = os.memfd_create("routes")
        try:
            with os.fdopen(os.dup(file), "wb") as opened:
                opened.write(rows.data)
            socket.send_fds(self._socket, [json.dumps(header).encode()], [file])
        finally:
            os.close(file)


class RouteReceiver:
    """The engine's end: takes connections of any number of workers, and hands routes to the engine's event loop."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections: list[socket.socket] = []
        self._arrived: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._routes: dict[tuple[str, int], np.ndarray] = {}
        self._closed = False

    def open(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        """Listen for workers at this path, which only the user may reach; routes arrive in this loop."""
        self._socket.bind(path)
        self._socket.listen()
        self._start_thread(self._accept, loop)

    def expect(self, request_id: str, samples: int) -> None:
        """Keep the routes of a request that is about to be sent to vLLM; others are dropped."""
        loop = asyncio.get_running_loop()
        self._arrived |= {(request_id, index): loop.create_future() for index in range(samples)}

    async def take(self, request_id: str, index: int, timeout: float) -> np.ndarray | None:
        """(tokens of whole blocks, layers, K): routes of one sample; None if vLLM never ran it. Wait until it ended."""
        key = request_id, index
        try:
            async with asyncio.timeout(timeout):
                await self._arrived[key]
        except TimeoutError:
            raise EngineUnavailableError(
                "vLLM ended a request, but its worker did not send the routes",
                sample=index,
                expected=f"routes within {timeout:g} s",
                remedy='See the log of the worker; capture = "vllm" uses vLLM\'s own capture',
            ) from None
        return self._routes.pop(key, None)

    def forget(self, request_id: str, samples: int) -> None:
        """Drop what is known of a request."""
        for index in range(samples):
            self._arrived.pop((request_id, index), None)
            self._routes.pop((request_id, index), None)

    def close(self) -> None:
        """Stop listening, and end the threads that wait for workers."""
        self._closed = True
        for one in (self._socket, *self._connections):
            with suppress(OSError):  # not connected (any more)
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            one.close()

    # ---- threads ------------------------------------------------------------------------------------------------

    def _start_thread(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="routes", daemon=True).start()

    def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            self._connections.append(connection)
            self._start_thread(self._receive, connection, loop)

    def _receive(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed:
            try:
                message, files, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
            except OSError:
                message, files = b"", []
            with suppress(RuntimeError):  # the loop is closed: nobody is waiting
                if not message:
                    loop.call_soon_threadsafe(self._fail)
                    return
                loop.call_soon_threadsafe(self._arrive_all, _read(message, files))

    # ---- in the event loop --------------------------------------------------------------------------------------

    def _arrive_all(self, ended: Sequence[tuple[str, bool, np.ndarray | None]]) -> None:
        """Keep the routes of requests; without complete ones, those from before a request was preempted remain."""
        for internal, final, routes in ended:
            found = _INTERNAL_ID.fullmatch(internal)
            assert found is not None
            key = found["request_id"], int(found["index"] or 0)
            arrived = self._arrived.get(key)
            if arrived is None or arrived.done():
                continue
            if routes is not None:
                self._routes[key] = routes
            if final:
                arrived.set_result(None)

    def _fail(self) -> None:
        for arrived in self._arrived.values():
            if not arrived.done():
                arrived.set_exception(EngineUnavailableError("vLLM's worker has ended, and with it the routes"))
                arrived.exception()  # retrieved: nobody may be waiting for it


def _read(message: bytes, files: Sequence[int]) -> list[tuple[str, bool, np.ndarray | None]]:
    """Return (request, whether it is done, its routes) for each request of a message; routes are not copied."""
    header = json.loads(message)
    block, layers, top_k = header["shape"]
    blocks = sum(count for *_, count in header["requests"])
    rows = np.zeros((0, block, layers, top_k), header["dtype"])
    try:
        if blocks:
            rows = np.frombuffer(mmap.mmap(files[0], 0, access=mmap.ACCESS_READ), header["dtype"])
    finally:
        for file in files:
            os.close(file)
    rows = rows.reshape(-1, layers, top_k)
    found, start = [], 0
    for internal, final, complete, count in header["requests"]:
        end = start + count * block
        found.append((internal, final, rows[start:end] if complete else None))
        start = end
    return found


def _nothing() -> None:
    """There is nothing to wait for on a CPU."""
