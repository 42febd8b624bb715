"""Source of vLLM's routes: its own capture, or ours in the worker (`slot_routes.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from moe_replay.errors import EngineError
from moe_replay.rollout.vllm.capture_choice import chosen_capture
from moe_replay.rollout.vllm.replicas import Replicas
from moe_replay.rollout.vllm.route_channel import RouteReceiver

CapturedRoutes = Callable[[Any, int], Awaitable[np.ndarray | None]]
"""(output of a sample, tokens of its prompt) -> (tokens - 1, decoder layers, K)."""
ROUTES_TIMEOUT = 120.0  # seconds from the end of a request until its worker has sent the routes

_WORKERS = "moe_replay.rollout.vllm.capture_worker"


def capture_arguments(capture: str, *, on_cpu: bool) -> dict[str, Any]:
    """Return the engine arguments of vLLM for a capture."""
    arguments: dict[str, Any] = {"enable_return_routed_experts": capture != "ours"}
    if capture != "vllm":
        arguments["worker_cls"] = f"{_WORKERS}.{'CpuWorker' if on_cpu else 'GpuWorker'}"
        arguments["additional_config"] = {"moe_replay_capture": True}  # part of the key of compiled code
    elif not on_cpu:
        arguments["worker_cls"] = f"{_WORKERS}.GpuWorkerWithoutCapture"
    return arguments


class RouteSource:
    """Source of the routes of a finished request.

    capture   which one records them: "ours", "vllm" or "checked"
    """

    def __init__(self, capture: str, options: Mapping[str, Any], engine: str, lacks: Sequence[str] = ()) -> None:
        self.capture = chosen_capture(capture, options, lacks)
        self._engine = engine
        self._receiver = None if self.capture == "vllm" else RouteReceiver()

    async def connect(self, replicas: Replicas, folder: Path) -> None:
        """Have the workers of a started engine send their routes here, through a socket in a folder of ours."""
        if self._receiver is not None:
            path = str(folder / "routes")
            self._receiver.open(path, asyncio.get_running_loop())
            await replicas.call_workers("replay_send_routes_to", path)

    @asynccontextmanager
    async def request(self, request_id: str, samples: int) -> AsyncIterator[CapturedRoutes]:
        """Yield a function that returns the routes of the finished samples of this request."""
        receiver = self._receiver
        if receiver is None:
            yield _own_routes
            return
        receiver.expect(request_id, samples)

        async def routes(output: Any, prompt_tokens: int) -> np.ndarray | None:
            if not output.token_ids:  # aborted before the prompt was computed
                return None
            blocks = await receiver.take(request_id, output.index, ROUTES_TIMEOUT)
            found = None if blocks is None else blocks[: prompt_tokens + len(output.token_ids) - 1]
            return self._checked(found, output) if self.capture == "checked" else found

        try:
            yield routes
        finally:
            receiver.forget(request_id, samples)

    def close(self) -> None:
        """Stop listening to the workers."""
        if self._receiver is not None:
            self._receiver.close()

    def _checked(self, ours: np.ndarray | None, output: Any) -> np.ndarray:
        theirs = output.routed_experts
        if ours is None or theirs is None or ours.shape != theirs[: len(ours)].shape:
            shapes = ("nothing" if routes is None else routes.shape for routes in (theirs, ours))
            raise EngineError(
                f"{self._engine}: its own route capture and ours are of different shapes",
                sample=output.index,
                found="{} and {}".format(*shapes),
            )
        apart = np.flatnonzero((ours != theirs[: len(ours)]).any((1, 2)))
        if apart.size:
            raise EngineError(
                f"{self._engine}: its own route capture and ours differ",
                sample=output.index,
                found=f"{apart.size} of {len(ours)} tokens, the first at {apart[0]}, the last at {apart[-1]}",
                remedy="A token that is computed twice (after a preemption, or by two requests with the same prefix) "
                "need not be routed alike, unless VLLM_BATCH_INVARIANT=1 is set",
            )
        return ours


async def _own_routes(output: Any, prompt_tokens: int) -> np.ndarray | None:
    """Return what vLLM's own capture has put into an output."""
    return output.routed_experts


def token_logprobs(logprobs: Any) -> np.ndarray:
    """Return (T,) float32 of flat log-probs: at each position the first, of the token itself; 0 if there is none."""
    if logprobs is None:
        return np.zeros(0, np.float32)
    if logprobs.start_indices == list(range(len(logprobs.logprobs))):  # one at each position, as for samples
        return np.asarray(logprobs.logprobs, np.float32)
    values = np.asarray([*logprobs.logprobs, 0.0], np.float32)
    starts, ends = np.asarray(logprobs.start_indices, int), np.asarray(logprobs.end_indices, int)
    return values[np.where(starts < ends, starts, -1)]
