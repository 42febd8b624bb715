"""Client of `moe-replay rollout`: an engine in another process or on another machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from moe_replay.engines.base import Engine, LoraSpec, StartRequest
from moe_replay.engines.http import HttpClient, reading_answer
from moe_replay.engines.pool import connect
from moe_replay.engines.server.sample_wire import decode_samples
from moe_replay.engines.server.update_body import write_update
from moe_replay.errors import EngineAnswerError, EngineError, EngineName
from moe_replay.records import Sample, SamplingParams
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.weights.identity import CurrentWeights, Probe, WeightsLedger
from moe_replay.weights.lora_adapter import Adapter
from moe_replay.weights.source import Weights
from moe_replay.weights.transfer import Receivers, Transfer


def start(request: StartRequest) -> Engine:
    """Connect to the servers at `request.urls`, which must have room for the adapter that they are sent."""
    return connect(RolloutClient, request, lora=request.lora)


class _Info(BaseModel):
    """A server's `/info`."""

    engine: tuple[str, str]
    weight_version: int
    num_layers: int
    model_type: str
    moe_layers: list[tuple[int, int, int]]
    weights_id: str
    receivers: tuple[str, tuple[str, ...]] | None = None
    opens: tuple[str, ...] = ()
    lora: tuple[int, tuple[str, ...]] | None = None


class RolloutClient(HttpClient):
    """Client of a rollout server.

    lora   of the adapter that updates will consist of; a server without room for it is refused

    Example:
        engine = RolloutClient("http://127.0.0.1:8000", token=token)
    """

    def __init__(self, url: str, *, lora: LoraSpec | None = None, **settings: Any) -> None:
        super().__init__(url, **settings)
        self._lora = lora
        self._ledger = WeightsLedger(self.url)

    @cached_property
    def name(self) -> EngineName:
        return EngineName(*self._info().engine)

    @cached_property
    def topology(self) -> MoeTopology:
        info = self._info()
        layers = tuple(MoeLayer(*numbers) for numbers in info.moe_layers)
        return MoeTopology(info.num_layers, layers, info.model_type)

    @cached_property
    def receivers(self) -> Receivers | None:
        """Processes that receive weights in a transfer to the server; None: its engine takes no transfers."""
        info = self._info()
        return None if info.receivers is None else Receivers(*info.receivers, info.opens)

    def current_weights(self) -> CurrentWeights:
        info = self._info()
        return CurrentWeights(info.weight_version, info.weights_id)

    def _info(self, method: str = "GET", path: str = "/info", body: Iterator[bytes] | None = None) -> _Info:
        try:
            info = _Info.model_validate(self._call(method, path, body=body))
        except (ValidationError, EngineAnswerError) as error:
            raise EngineAnswerError(
                f"{self.url} does not answer {path} as a rollout server does",
                expected="engine, topology and weight version as JSON",
                found=" ".join(str(error).split())[:300],
                remedy="The URL must be that of `moe-replay rollout`, and a proxy must pass its answers on",
            ) from error

        self._check_lora(None if info.lora is None else LoraSpec(*info.lora))
        return info

    def _check_lora(self, served: LoraSpec | None) -> None:
        """Raise if the server has no room for the adapter."""
        adapter = self._lora
        if adapter is None or (served is not None and served.has_room_for(adapter)):
            return
        raise EngineError(
            f"{self.url} has no room for the adapter that it would be sent",
            expected=f"LoRA of rank {adapter.rank} in {', '.join(adapter.modules)}",
            found="no LoRA" if served is None else f"rank {served.rank} in {', '.join(served.modules) or 'all'}",
            remedy="Start it with --lora-rank and --lora-target-modules of the recipe, or set rollout.lora = false",
        )

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        request = {"prompt_ids": [int(token) for token in prompt], "params": dataclasses.asdict(params)}
        samples = decode_samples((await self._post("/generate", request)).content)
        self._ledger.check(samples)
        return samples

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        request = {"token_ids": [int(token) for token in token_ids]}
        answer = self._call("POST", "/prompt_logprobs", json=request)
        with reading_answer(self.url):
            logprobs = np.asarray(answer["logprobs"], np.float32)
        if logprobs.shape != (len(token_ids) - 1,):
            raise EngineAnswerError(
                f"{self.url} scored another sequence", expected=f"{len(token_ids) - 1} log-probs", found=logprobs.shape
            )
        return logprobs

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Stream new weights to the server; a folder must be one that the server can read.

        The server must name them in its response: anything else that answers has not taken them. From an update with a
        `weights_id` on, samples of other weights than this client has sent are refused.
        """
        self._update(weights, version, probe, weights_id)

    def receive_weights(
        self, transfer: Transfer, version: int, probe: Probe | None = None, weights_id: str = ""
    ) -> None:
        """Send the messages of a transfer to the server, with the promises of `update_weights`."""
        self._update(transfer, version, probe, weights_id)

    def update_adapter(self, adapter: Adapter, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Stream an adapter to the server, with the promises of `update_weights`."""
        self._update(adapter, version, probe, weights_id)

    def _update(
        self, weights: Weights | Adapter | Transfer, version: int, probe: Probe | None, weights_id: str
    ) -> None:
        self._ledger.record(version, weights_id)
        info = self._info("POST", "/weights", write_update(weights, version, probe, weights_id, self.url))
        self._check_taken(CurrentWeights(info.weight_version, info.weights_id), version, weights_id)

    def sleep(self, level: int = 1) -> None:
        self._call("POST", "/sleep" if level == 1 else f"/sleep?level={level}")

    def wake(self) -> None:
        self._call("POST", "/wake")

    def wake_for_update(self) -> None:
        """Have the server take memory for the weights that are sent next."""
        self._call("POST", "/wake?for_update=1")

    def abort(self) -> None:
        """Abort running requests of all clients."""
        self._call("POST", "/abort")
