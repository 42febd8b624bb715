"""The routes of vLLM's requests: by vLLM's own capture, or recorded in its workers and sent to the engine.

Our workers (`capture_worker.py`) send through shared memory, announced over a Unix socket: each message names the
requests that ended and carries an anonymous file (memfd) with the expert ids of all of them. Only the socket has a name
in the file system, so a killed process leaves nothing behind.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_replay.engines.vllm.release import chosen_capture
from moe_replay.errors import EngineError, EngineUnavailableError
from moe_replay.utils.device import device_module

CallWorkers = Callable[..., Awaitable[list[Any]]]
"""(method, *arguments) -> the answer of each worker."""
UNROUTED = "unrouted"
"""In the id of a request whose routes are not needed."""
ROUTES_TIMEOUT_S = 120.0  # from the end of a request until its worker has sent the routes

_REQUESTS_PER_MESSAGE = 256
_MESSAGE_BYTES = 2**17
_INTERNAL_ID = re.compile(r"(?:(?P<index>\d+)_)?(?P<request_id>.*?)(?:-[0-9a-f]{8})?")


class RouteSource:
    """The routes of finished requests.

    capture   which one records them: "kv_slot", "vllm" or "cross_check"
    """

    def __init__(self, capture: str, options: Mapping[str, Any], engine: str, missing: Sequence[str] = ()) -> None:
        self.capture = chosen_capture(capture, options, missing)
        self._engine = engine
        self._receiver = None if self.capture == "vllm" else RouteReceiver()

    async def connect(self, call_workers: CallWorkers, folder: Path) -> None:
        """Have the workers of a started engine send their routes here, through a socket in `folder`."""
        if self._receiver is not None:
            path = str(folder / "routes")
            self._receiver.open(path, asyncio.get_running_loop())
            await call_workers("replay_send_routes_to", path)

    @contextmanager
    def request(self, request_id: str, samples: int) -> Iterator[None]:
        """Accept the routes of a request's samples in this block; others are dropped."""
        receiver = self._receiver
        if receiver is None:
            yield
            return
        receiver.expect(request_id, samples)
        try:
            yield
        finally:
            receiver.forget(request_id, samples)

    async def routed_experts(self, request_id: str, output: Any, prompt_tokens: int) -> np.ndarray | None:
        """(tokens - 1, decoder layers, K) of vLLM's finished completion; None: nothing was computed."""
        if self._receiver is None:
            return output.routed_experts
        if not output.token_ids:  # aborted before the prompt was computed
            return None
        routed_experts = await self._receiver.take(request_id, output.index, ROUTES_TIMEOUT_S)
        if routed_experts is not None:  # of whole KV blocks
            routed_experts = routed_experts[: prompt_tokens + len(output.token_ids) - 1]
        return self._cross_check(routed_experts, output) if self.capture == "cross_check" else routed_experts

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _cross_check(self, routed_experts: np.ndarray | None, output: Any) -> np.ndarray:
        by_vllm = output.routed_experts
        if routed_experts is None or by_vllm is None or routed_experts.shape != by_vllm[: len(routed_experts)].shape:
            shapes = ("nothing" if array is None else array.shape for array in (by_vllm, routed_experts))
            raise EngineError(
                f"{self._engine}: its own route capture and ours have different shapes",
                sample=output.index,
                found="{} and {}".format(*shapes),
            )
        differing = np.flatnonzero((routed_experts != by_vllm[: len(routed_experts)]).any((1, 2)))
        if differing.size:
            raise EngineError(
                f"{self._engine}: its own route capture and ours differ",
                sample=output.index,
                found=f"{differing.size} of {len(routed_experts)} tokens, "
                f"the first at {differing[0]}, the last at {differing[-1]}",
                remedy="A token that is computed twice (after a preemption, or by two requests with the same prefix) "
                "may be routed differently, unless VLLM_BATCH_INVARIANT=1 is set",
            )
        return routed_experts


# ---- from the workers to the engine ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that leaves the worker.

    request_id   vLLM's internal id
    final        it is done; False: preempted, and it may run again
    complete     its KV blocks hold routes of all its tokens; False: it was preempted, and not all were computed again
    blocks       number of its KV blocks
    """

    request_id: str
    final: bool
    complete: bool
    blocks: int


def needs_routes(request_id: str) -> bool:
    return UNROUTED not in request_id


class RouteSender:
    """The worker's end. A thread sends, once the copy from the device has arrived."""

    def __init__(self, path: str, shape: tuple[int, int]) -> None:
        """Connect to the engine; `shape` is (layers, K)."""
        self._shape = shape
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._queue: queue.SimpleQueue[tuple[Sequence[EndedRequest], Tensor, Callable[[], None]]] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="routes", daemon=True).start()

    def send(self, ended: Sequence[EndedRequest], routed_experts: Tensor) -> None:
        """Send the routes of ended requests, (blocks, block size, layers * K), in the background."""
        if routed_experts.device.type == "cpu":
            self._queue.put((ended, routed_experts, lambda: None))
            return
        on_host = torch.empty(routed_experts.shape, dtype=routed_experts.dtype, pin_memory=True)
        on_host.copy_(routed_experts, non_blocking=True)
        copied = device_module(routed_experts.device).Event()
        copied.record()
        self._queue.put((ended, on_host, copied.synchronize))

    def _send_all(self) -> None:
        while True:
            ended, routed_experts, wait_for_copy = self._queue.get()
            wait_for_copy()
            data = routed_experts.numpy()
            first_block = 0
            try:
                for first in range(0, len(ended), _REQUESTS_PER_MESSAGE):
                    batch = ended[first : first + _REQUESTS_PER_MESSAGE]
                    blocks = sum(request.blocks for request in batch)
                    self._send(batch, data[first_block : first_block + blocks])
                    first_block += blocks
            except OSError:  # the engine has closed its end
                return

    def _send(self, ended: Sequence[EndedRequest], routed_experts: np.ndarray) -> None:
        header = {
            "dtype": f"u{routed_experts.itemsize}",
            "shape": [routed_experts.shape[1], *self._shape],
            "requests": [(request.request_id, request.final, request.complete, request.blocks) for request in ended],
        }
        file = os.memfd_create("routes")
        try:
            with os.fdopen(os.dup(file), "wb") as opened:
                opened.write(routed_experts.data)
            socket.send_fds(self._socket, [json.dumps(header).encode()], [file])
        finally:
            os.close(file)


class RouteReceiver:
    """The engine's end: accepts any number of workers, and hands routes to the engine's event loop."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections: list[socket.socket] = []
        self._arrivals: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._routed_experts: dict[tuple[str, int], np.ndarray] = {}
        self._closed = False

    def open(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        """Listen for workers at this path, which only the user may reach; routes arrive in `loop`."""
        self._socket.bind(path)
        self._socket.listen()
        self._start_thread(self._accept, loop)

    def expect(self, request_id: str, samples: int) -> None:
        """Keep the routes of a request that is about to be sent to vLLM; others are dropped."""
        loop = asyncio.get_running_loop()
        self._arrivals |= {(request_id, index): loop.create_future() for index in range(samples)}

    async def take(self, request_id: str, index: int, timeout_s: float) -> np.ndarray | None:
        """Wait until a sample has ended; return (tokens of whole blocks, layers, K), or None if vLLM never ran it."""
        key = request_id, index
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrivals[key]
        except TimeoutError:
            raise EngineUnavailableError(
                "vLLM ended a request, but its worker did not send the routes",
                sample=index,
                expected=f"routes within {timeout_s:g} s",
                remedy='See the log of the worker; capture = "vllm" uses vLLM\'s own capture',
            ) from None
        return self._routed_experts.pop(key, None)

    def forget(self, request_id: str, samples: int) -> None:
        for index in range(samples):
            self._arrivals.pop((request_id, index), None)
            self._routed_experts.pop((request_id, index), None)

    def close(self) -> None:
        """Stop listening, and end the threads that wait for workers."""
        self._closed = True
        for connection in (self._socket, *self._connections):
            with suppress(OSError):  # not connected (any more)
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
            connection.close()

    # Threads

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, name="routes", daemon=True).start()

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
                loop.call_soon_threadsafe(self._deliver, _read(message, files))

    # In the event loop

    def _deliver(self, ended: Sequence[tuple[str, bool, np.ndarray | None]]) -> None:
        """Keep the routes of requests; routes from before a preemption stay until complete ones replace them."""
        for internal_id, final, routed_experts in ended:
            match = _INTERNAL_ID.fullmatch(internal_id)
            assert match is not None
            key = match["request_id"], int(match["index"] or 0)
            arrival = self._arrivals.get(key)
            if arrival is None or arrival.done():
                continue
            if routed_experts is not None:
                self._routed_experts[key] = routed_experts
            if final:
                arrival.set_result(None)

    def _fail(self) -> None:
        for arrival in self._arrivals.values():
            if not arrival.done():
                arrival.set_exception(EngineUnavailableError("vLLM's worker has ended, and with it the routes"))
                arrival.exception()  # retrieved: nobody may be waiting for it


def _read(message: bytes, files: Sequence[int]) -> list[tuple[str, bool, np.ndarray | None]]:
    """Return (request, whether it is done, its routes) for each request of a message; routes are not copied."""
    header = json.loads(message)
    block_size, layers, top_k = header["shape"]
    blocks = sum(count for *_, count in header["requests"])
    data = np.zeros(0, header["dtype"])
    try:
        if blocks:
            data = np.frombuffer(mmap.mmap(files[0], 0, access=mmap.ACCESS_READ), header["dtype"])
    finally:
        for file in files:
            os.close(file)
    routed_experts = data.reshape(-1, layers, top_k)
    requests: list[tuple[str, bool, np.ndarray | None]] = []
    start = 0
    for internal_id, final, complete, count in header["requests"]:
        end = start + count * block_size
        requests.append((internal_id, final, routed_experts[start:end] if complete else None))
        start = end
    return requests
