"""Client of `moe-replay rollout`: an engine in another process or on another machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from moe_replay.errors import EngineName
from moe_replay.rollout.engine import Engine, StartRequest
from moe_replay.rollout.http import HttpClient
from moe_replay.rollout.pool import connect
from moe_replay.rollout.sample_wire import decode_samples
from moe_replay.rollout.types import Probe, Sample, SamplingParams, Weights
from moe_replay.rollout.weight_stream import write_update
from moe_replay.routes.topology import MoeLayer, MoeTopology


def start(request: StartRequest) -> Engine:
    """Connect to the servers at `request.urls`."""
    return connect(VllmServer, request)


class VllmServer(HttpClient):
    """Client of a rollout server.

    Example:
        engine = VllmServer("http://127.0.0.1:8000", token=token)
    """

    @cached_property
    def name(self) -> EngineName:
        return EngineName(*self._info()["engine"])

    @cached_property
    def topology(self) -> MoeTopology:
        info = self._info()
        layers = tuple(MoeLayer(*numbers) for numbers in info["moe_layers"])
        return MoeTopology(info["num_layers"], layers, info["model_type"])

    @property
    def weight_version(self) -> int:
        return self._info()["weight_version"]

    def _info(self) -> dict[str, Any]:
        return self._call("GET", "/info")

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        request = {"prompt_ids": [int(token) for token in prompt], "params": dataclasses.asdict(params)}
        return decode_samples((await self._post("/generate", request)).content)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        request = {"token_ids": [int(token) for token in token_ids]}
        return np.asarray(self._call("POST", "/prompt_logprobs", json=request)["logprobs"], np.float32)

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Stream new weights to the server; a folder must be one that the server can read."""
        self._call("POST", "/weights", body=write_update(weights, version, probe))

    def sleep(self) -> None:
        self._call("POST", "/sleep")

    def wake(self) -> None:
        self._call("POST", "/wake")

    def abort(self) -> None:
        """Abort running requests of all clients."""
        self._call("POST", "/abort")
