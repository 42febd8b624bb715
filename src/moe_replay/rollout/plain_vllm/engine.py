"""Client of a plain `vllm serve` that is trained with: samples, routes, weights and versions by its own endpoints.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --enable-return-routed-experts \
        --logprobs-mode processed_logprobs
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from moe_replay.errors import EngineAnswerError, EngineError, EngineName, EngineUnavailableError
from moe_replay.rollout.answers import reading_answer
from moe_replay.rollout.engine import Engine, StartRequest
from moe_replay.rollout.http import HttpClient
from moe_replay.rollout.model_folder import read_config
from moe_replay.rollout.plain_vllm.weights import WeightKind, WeightRoute, check_backend, weight_route
from moe_replay.rollout.plain_vllm.wire import (
    ChoiceReader,
    ServerSettings,
    generate_request,
    score_request,
    scored_logprobs,
    version_of,
)
from moe_replay.rollout.pool import connect
from moe_replay.rollout.request_barrier import RequestBarrier
from moe_replay.rollout.state import EngineState
from moe_replay.rollout.types import Probe, Sample, SamplingParams
from moe_replay.rollout.vllm.masks import MASK_OPTION, MaskReturn
from moe_replay.rollout.vllm.release import check_version
from moe_replay.rollout.vllm.transfer_engines import EngineTransfer, Server
from moe_replay.rollout.weights.identity import (
    INCOMPLETE,
    CurrentWeights,
    WeightsLedger,
    parse_version_text,
    version_text,
)
from moe_replay.rollout.weights.transfer import Transfer
from moe_replay.rollout.weights.types import Weights
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology

GENERATE = "/inference/v1/generate"
REPLICA_HEADER = "X-data-parallel-rank"


def start(request: StartRequest) -> Engine:
    """Connect to the servers at `request.urls`, which have the model `request.model`."""
    config = read_config(request.model, trust_remote_code=request.trust_remote_code)
    return connect(
        PlainVllmEngine,
        request,
        topology=MoeTopology.from_config(config, load_router_family(request.router_family)),
        vocabulary=config.get_text_config().vocab_size,
        max_length=request.max_length,
        weight_version=request.weight_version,
        sampling_mask=request.sampling_mask,
    )


class PlainVllmEngine(HttpClient):
    """vLLM's own server, of 0.30 or later, in developer mode.

    topology         of its model: MoeTopology.from_config(AutoConfig.from_pretrained(...))
    vocabulary       tokens that the model knows
    max_length       tokens of a sequence at most, which the server must take; None: not checked
    weight_version   of the weights that the server was started with
    sampling_mask    samples will be asked for with their sampling mask
    weights          how new weights reach the server
    shared_folder    that this process and the server see, for `weights="folder"`; None: the temporary folder
    token            the server's `--api-key`
    limits           max_concurrent, timeout and others of `HttpClient`

    Example:
        engine = PlainVllmEngine("http://127.0.0.1:8000", topology, vocabulary=151936)
    """

    drains = True  # before 0.32 the server is asked for the version of a sample after its request

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
        token: str | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(url, token=token, **limits)
        self._given_topology = topology
        self._vocabulary = vocabulary
        self._max_length, self._first_version = max_length, weight_version
        self._needs_masks = sampling_mask
        self._weight_kind = weights
        self._shared_folder = None if shared_folder is None else Path(shared_folder)
        self._state = EngineState(f"vLLM at {self.url}", weight_version)
        self._ledger = WeightsLedger(self._state.engine)
        self._barrier = RequestBarrier(self._loop.loop)

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
    def _route(self) -> WeightRoute:
        return weight_route(self._weight_kind, self.settings, self.url, self._post_json, self._shared_folder)

    def _developer_mode(self) -> AbstractContextManager[None]:
        return _explained(
            404,
            problem=f"vLLM at {self.url} cannot be given weights",
            remedy="Start it with VLLM_SERVER_DEV_MODE=1 in its environment, on a network that you trust: that opens "
            "endpoints without a password. vLLM before 0.30 does not have them: use `moe-replay rollout`",
        )

    @property
    def weight_version(self) -> int:
        """Version of the server's current weights."""
        return self.current_weights().version

    def current_weights(self) -> CurrentWeights:
        """Return what the server says of its weights."""
        _ = self.settings  # an error now, not after the first sample
        with self._developer_mode():
            answer = self._call("GET", "/weight_info")
        with reading_answer(self.url):
            return parse_version_text(str(answer["weight_version"]), self._first_version, self._state.engine)

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
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
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if len(choices) != params.draws:
                raise EngineError(f"{self.name} lost samples", expected=params.draws, found=len(choices))
            if answer.get("prompt_token_ids") not in (None, request["token_ids"]):
                raise EngineError(f"{self.name} continued another prompt than it was sent")
            texts = [version_of(choice, self._state.engine) for choice in choices]
            current = None if all(texts) else await asyncio.to_thread(self.current_weights)
        ids, reader = np.asarray(prompt, np.int32), ChoiceReader(self.name, self.topology, self._masks)
        samples = [
            reader.sample(ids, choice, self._weights_of(text, current), params)
            for choice, text in zip(choices, texts, strict=True)
        ]
        self._ledger.check(samples)
        return samples * (params.n // params.draws)

    def _weights_of(self, text: str | None, current: CurrentWeights | None) -> CurrentWeights:
        """Return the weights of a sample. Before 0.32 the server is asked; they do not change while a request runs."""
        if text is not None:
            return parse_version_text(text, self._first_version, self._state.engine)
        assert current is not None
        return current

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        self._state.require_ready()
        return self._prompt_logprobs(token_ids)

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

    def follow_update(self, version: int, weights_id: str) -> None:
        """Accept samples of weights that another process sends to the server."""
        self._ledger.record(version, weights_id)

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace all weights while the server is paused; running requests are aborted, those of this client wait.

        vLLM's own endpoints do not notice missing weights: pass a `probe`.
        """
        send = self._sender(weights)
        self._ledger.record(version, weights_id)
        self._loop.run(self._barrier.close(self._abort))
        with self._barrier.open_on_error(), self._state.update_to(version, weights_id):
            with self._paused():
                self._stamp(version, INCOMPLETE)
                send()
                self._stamp(version, weights_id)
            found = self.current_weights()
            if found != (version, weights_id):
                raise EngineAnswerError(
                    f"{self._state.engine} answered an update of its weights and does not have them",
                    expected=version_text(version, weights_id),
                    found=version_text(*found),
                    remedy="Somebody else updates it, or a proxy does not pass requests on",
                )
            if probe is not None:
                self._check_probe(probe)
        self._barrier.open()

    def _check_probe(self, probe: Probe) -> None:
        """Raise unless every replica computes with the weights: the server's answers are those of the first alone."""
        replicas = self.settings.replicas
        for replica in range(replicas):
            found = self._prompt_logprobs(probe.token_ids, replica if replicas > 1 else None)
            probe.check(found, f"{self.name}, replica {replica}" if replicas > 1 else str(self.name))

    def _sender(self, weights: Weights) -> Callable[[], None]:
        """Return what replaces the weights of the paused server; raise if they cannot come this way."""
        if isinstance(weights, EngineTransfer):
            check_backend(weights.kind, self.settings, self.url)
            workers = int(self._post_json("/get_world_size")["world_size"])
            is_new = self.current_weights() != (self._state.weight_version, self._state.weights_id)
            server = Server(self._post_json, workers, self.settings.tensor_parallel, is_new)
            return partial(weights.take_part, self.url, server)
        if isinstance(weights, Transfer):
            raise EngineError(f"{self._state.engine} takes no transfers", remedy='Set weights.kind = "http"')
        _ = self.settings
        return partial(self._route.send, weights)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Abort running requests of all clients and drop cached prefixes; new requests wait in the server."""
        self._post_json("/pause?mode=abort")
        with ExitStack() as undo:
            undo.callback(self._resume_after_error)
            yield
            undo.pop_all()
        self._post_json("/resume")

    def _resume_after_error(self) -> None:
        with suppress(EngineError):  # what went wrong before says more
            self._post_json("/resume")

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
        """Undo `sleep`."""
        if self._state.asleep:
            if self.settings.sleeps:
                self._command("/wake_up")
            self._state.asleep = False

    def _command(self, path: str) -> None:
        """Send a request whose answer has no content before 0.32."""
        self._loop.run(self._post(path, {}))


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
