"""Client of a plain `vllm serve`: samples, routes, weights and versions by its own endpoints.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --enable-return-routed-experts \
        --logprobs-mode processed_logprobs

A client that only samples (`takes_weights=False`) needs `--enable-return-routed-experts` alone and uses the OpenAI
route; it is for evaluation, and for weights that something else updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from moe_replay.engines.base import Engine, StartRequest
from moe_replay.engines.http import ForeignClient, between, reading_answer
from moe_replay.engines.pool import connect
from moe_replay.engines.requests import sampled_version
from moe_replay.engines.vllm.masks import MASK_OPTION, MaskReturn
from moe_replay.engines.vllm.release import check_version
from moe_replay.engines.vllm_serve.weights import Send, WeightKind, weight_route
from moe_replay.engines.vllm_serve.wire import (
    PROCESSED,
    ServerSettings,
    completions_request,
    generate_request,
    read_choice,
    score_request,
    scored_logprobs,
    sorted_choices,
)
from moe_replay.errors import EngineError, EngineName, EngineUnavailableError
from moe_replay.records import Sample, SamplingParams
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology
from moe_replay.weights.identity import INCOMPLETE, CurrentWeights, Probe, version_text
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.source import Weights

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
REPLICA_HEADER = "X-data-parallel-rank"


def start(request: StartRequest) -> Engine:
    config = read_config(request.model, trust_remote_code=request.trust_remote_code)
    return connect(
        VllmServeClient,
        request,
        topology=MoeTopology.from_config(config, load_router_family(request.router_family)),
        vocabulary=config.get_text_config().vocab_size,
        max_length=request.max_length,
        weight_version=request.weight_version,
        sampling_mask=request.sampling_mask,
        model=request.model,
        takes_weights=not request.sample_only,
    )


class VllmServeClient(ForeignClient):
    """vLLM's own OpenAI-compatible server; to be given weights, of 0.30 or later and in developer mode.

    topology         of its model: MoeTopology.from_config(AutoConfig.from_pretrained(...))
    vocabulary       tokens that the model knows
    max_length       tokens of a sequence at most, which the server must take; None: not checked
    weight_version   of the weights that the server was started with
    sampling_mask    samples will be requested with their sampling mask
    weights          how new weights reach the server
    shared_folder    that this process and the server see, for `weights="folder"`; None: the temporary folder
    takes_weights    False: only sample, from a server that need not be in developer mode
    model            name of the model on the server, which only the OpenAI route needs
    processed_logprobs   without developer mode: whether the server was started with `--logprobs-mode
                     processed_logprobs`, which it then does not report; without it log-probs are right only at
                     temperature 1, top_p 1 and top_k 0
    token            the server's `--api-key`
    limits           max_concurrent, timeout and others of `HttpClient`

    Example:
        engine = VllmServeClient("http://127.0.0.1:8000", topology, vocabulary=151936)
    """

    def __init__(
        self,
        url: str,
        topology: MoeTopology,
        *,
        vocabulary: int,
        max_length: int | None = None,
        weight_version: int = 0,
        sampling_mask: bool = False,
        weights: WeightKind = "auto",
        shared_folder: str | Path | None = None,
        takes_weights: bool = True,
        model: str = "",
        processed_logprobs: bool = False,
        token: str | None = None,
        **limits: Any,
    ) -> None:
        super().__init__("vLLM", url, token, weight_version, limits)
        self._given_topology = topology
        self._vocabulary = vocabulary
        self._max_length = max_length
        self._needs_masks = sampling_mask
        self._takes_weights, self._model, self._processed_logprobs = takes_weights, model, processed_logprobs
        self._weight_kind = weights
        self._shared_folder = None if shared_folder is None else Path(shared_folder)

    # ---- properties ---------------------------------------------------------------------------------------------

    @cached_property
    def topology(self) -> MoeTopology:
        return self._given_topology

    @cached_property
    def name(self) -> EngineName:
        answer = self._call("GET", "/version")
        with reading_answer(self.url):
            return EngineName("vLLM", str(answer["version"]))

    @cached_property
    def settings(self) -> ServerSettings:
        """Settings that the server was started with; raises if it cannot be trained with."""
        if not self._takes_weights:
            return ServerSettings(logprobs_mode=PROCESSED if self._processed_logprobs else None)
        engine = f"{self.name} at {self.url}"
        check_version(self.name.version, f" at {self.url}")
        with self._developer_mode():
            answer = self._call("GET", "/server_info?config_format=json")
        with reading_answer(self.url):
            settings = ServerSettings.parse(answer)
        settings.check(engine, self._max_length)
        if self._needs_masks:
            MaskReturn(self.name, {MASK_OPTION: settings.returns_masks}, self._vocabulary).truncation(
                SamplingParams(sampling_mask=True)
            )
        return settings

    @cached_property
    def _masks(self) -> MaskReturn:
        return MaskReturn(self.name, {MASK_OPTION: self.settings.returns_masks}, self._vocabulary)

    @cached_property
    def _send_weights(self) -> Send:
        return weight_route(self._weight_kind, self.settings, self.url, self._post_json, self._shared_folder)

    def _developer_mode(self) -> AbstractContextManager[None]:
        return _explained(
            404,
            problem=f"vLLM at {self.url} cannot be given weights",
            remedy="Start it with VLLM_SERVER_DEV_MODE=1 in its environment, on a network that you trust: that opens "
            "endpoints without a password. vLLM before 0.30 does not have them: use `moe-replay rollout`",
        )

    def current_weights(self) -> CurrentWeights:
        if not self._takes_weights:
            return CurrentWeights(self._first_version, "")
        _ = self.settings  # an error now, not after the first sample
        with self._developer_mode():
            answer = self._call("GET", "/weight_info")
        with reading_answer(self.url):
            return self._parse_version(str(answer["weight_version"]))

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        if not self._takes_weights:
            return await self._sample_completions(prompt, params)
        await asyncio.to_thread(lambda: self._masks)  # cached; blocking, so not in this loop
        self.settings.check_request(params, self._state.engine)
        request = generate_request(prompt, params, self._masks)
        async with self._barrier.request():
            self._state.require_ready()
            with _explained(
                *(403, 404),
                problem=f"{self.name} at {self.url} does not serve {GENERATE}",
                remedy="Start it with --enable-scale-out",
            ):
                answer = (await self._post(GENERATE, request)).json()
            choices = sorted_choices(answer, params, self._state.engine)
            if answer.get("prompt_token_ids") not in (None, request["token_ids"]):
                raise EngineError(f"{self.name} continued another prompt than it was sent")
            engine = self._state.engine
            texts = [sampled_version(choice.get("weight_versions"), engine, choice["index"]) for choice in choices]
            current = None if all(texts) else await asyncio.to_thread(self.current_weights)
        about = (prompt, params, self.name, self.topology, self._masks)
        weights = [self._weights_of(text, current) for text in texts]
        samples = [read_choice(choice, of_choice, *about) for choice, of_choice in zip(choices, weights, strict=True)]
        self._ledger.check(samples)
        return samples * (params.n // params.draws)

    async def _sample_completions(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Sample by the OpenAI route, which every server has; it returns no sampling masks."""
        if params.sampling_mask:
            raise EngineError(
                f"{self._state.engine} returns no sampling masks by {COMPLETIONS}",
                remedy="Sample with sampling_mask=False",
            )
        self.settings.check_request(params, self._state.engine)
        answer = (await self._post(COMPLETIONS, completions_request(self._model, prompt, params))).json()
        about = (self.current_weights(), prompt, params, EngineName("vLLM", f"at {self.url}"), self.topology)
        choices = sorted_choices(answer, params, self._state.engine)
        return [read_choice(choice, *about) for choice in choices] * (params.n // params.draws)

    def _weights_of(self, text: str | None, current: CurrentWeights | None) -> CurrentWeights:
        """Return the weights of a sample. Before 0.32 the server is asked; they do not change while a request runs."""
        if text is not None:
            return self._parse_version(text)
        assert current is not None
        return current

    def _prompt_logprobs(self, token_ids: Sequence[int], replica: int | None = None) -> np.ndarray:
        where = None if replica is None else {REPLICA_HEADER: str(replica)}
        answer = self._call("POST", GENERATE, json=score_request(token_ids, self._masks), headers=where)
        with reading_answer(self.url):
            return scored_logprobs(answer, token_ids, self._state.engine)

    def abort(self) -> None:
        """Abort running requests of all clients."""
        self._loop.run(self._abort())

    async def _abort(self) -> None:
        await self._post("/abort_requests", {})

    # ---- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace all weights while the server is paused; running requests are aborted, those of this client wait.

        vLLM's own endpoints do not notice missing weights: pass a `probe`.
        """
        self._require_updates()
        send = self._send_weights
        self._ledger.record(version, weights_id)
        self._loop.run(self._barrier.close(self._abort))
        with self._barrier.open_on_error(), self._state.update_to(version, weights_id):
            # Aborts running requests of all clients and drops cached prefixes; new requests wait in the server.
            with between(self._post_json, "/pause?mode=abort", "/resume"):
                self._stamp(version, INCOMPLETE)
                send(weights)
                self._stamp(version, weights_id)
            self._check_taken(self.current_weights(), version, weights_id)
            if probe is not None:
                self._check_probe(probe)
        self._barrier.open()

    def _check_probe(self, probe: Probe) -> None:
        """Raise unless every replica computes with the weights: the server's answers are those of the first alone."""
        replicas = self.settings.replicas
        for replica in range(replicas):
            logprobs = self._prompt_logprobs(probe.token_ids, replica if replicas > 1 else None)
            probe.check(logprobs, f"{self.name}, replica {replica}" if replicas > 1 else str(self.name))

    def _require_updates(self) -> None:
        if not self._takes_weights:
            raise EngineError(
                f"{self._state.engine} cannot be given weights",
                found="a client that only samples",
                remedy="Connect with takes_weights=True to a server with VLLM_SERVER_DEV_MODE=1",
            )

    def _stamp(self, version: int, weights_id: str) -> None:
        """Name the weights to the server, which stamps its samples with it (0.32)."""
        self._post_json("/update_weight_version", {"new_version": version_text(version, weights_id)})

    def _post_json(self, path: str, content: object = None) -> Any:
        method = "GET" if path == "/get_world_size" else "POST"
        return self._call(method, path, json=content)

    # ---- sleep ---------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free the server's memory, if it was started with `--enable-sleep-mode`; requests of this client fail."""
        if not self._state.asleep:
            self._loop.run(self._barrier.close(self._abort))
            with self._barrier.open_on_error():
                if self.settings.sleeps:
                    self._command(f"/sleep?level={level}")
                self._state.asleep, self._state.weights_complete = True, self._state.weights_complete and level < 2
            self._barrier.open()

    def wake(self) -> None:
        if self._state.asleep:
            if self.settings.sleeps:
                self._command("/wake_up")
            self._state.asleep = False


@contextmanager
def _explained(*statuses: int, problem: str, remedy: str) -> Iterator[None]:
    """Say what to do where a server refuses a request with one of these statuses of HTTP."""
    try:
        yield
    except EngineUnavailableError:
        raise
    except EngineError as refusal:
        if refusal.found not in statuses:
            raise
        raise EngineError(problem, found=f"status {refusal.found}", remedy=remedy) from refusal
