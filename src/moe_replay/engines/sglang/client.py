"""Client of an SGLang server started with `--enable-return-routed-experts`: its native `/generate`.

A request that resumes an aborted one returns the routes of the whole sequence, cached prefix included, like any other
request. `Session` keeps the routes that it has and adds the new ones.
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
from moe_replay.engines.sglang.weights import SglangWeights, WeightCalls
from moe_replay.engines.sglang.wire import NO_PENALTIES, GenerateResponse, generate_request, request_seed, was_retracted
from moe_replay.errors import EngineError, EngineName
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.tested_versions import notice_if_newer
from moe_replay.weights.checkpoint import as_folder
from moe_replay.weights.identity import INCOMPLETE, CurrentWeights, Probe, version_text
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.source import Weights

RETRACTIONS = 3
"""Times that a sample is drawn again because the server retracted its request."""


def start(request: StartRequest) -> Engine:
    return connect(
        SglangClient, request, router_family=request.router_family, trust_remote_code=request.trust_remote_code
    )


class SglangClient(ForeignClient):
    """Client of an SGLang server.

    model_path       folder or name of the model that it serves; default: the folder that the server reports
    topology         of that model; default: from its config
    router_family    of a model unknown to this release
    trust_remote_code   run a config class that comes with the model
    weight_version   of the weights that the server was started with
    shared_folder    folder that the server can read too, for weights that come as an iterator
    weights          how weights that come as an iterator reach the server: `sglang_weights`
    token            the server's `--api-key`; its `--admin-api-key`, if it has one, to update weights
    limits           max_concurrent, timeout and others of `HttpClient`

    Example:
        engine = SglangClient("http://127.0.0.1:30000")
    """

    def __init__(
        self,
        url: str,
        *,
        model_path: str | Path | None = None,
        topology: MoeTopology | None = None,
        router_family: str | None = None,
        trust_remote_code: bool = False,
        weight_version: int = 0,
        shared_folder: Path | None = None,
        weights: SglangWeights = "folder",
        token: str | None = None,
        **limits: Any,
    ) -> None:
        super().__init__("SGLang", url, token, weight_version, limits)
        self._given_path = model_path
        self._given_topology = topology
        self._router_family = router_family
        self._trust_remote_code = trust_remote_code
        self._shared_folder = shared_folder
        self._weight_kind = weights
        self._temperature_checked = False

    # ---- properties ---------------------------------------------------------------------------------------------

    @cached_property
    def _settings(self) -> dict[str, Any]:
        settings = self._call("GET", "/server_info")
        with reading_answer(self.url):
            return {"version": str(settings["version"]), "model_path": str(settings["model_path"]), **settings}

    @cached_property
    def name(self) -> EngineName:
        notice_if_newer("sglang", self._settings["version"])
        return EngineName("SGLang", self._settings["version"])

    @cached_property
    def topology(self) -> MoeTopology:
        if self._given_topology is not None:
            return self._given_topology
        path = self._given_path or self._settings["model_path"]
        if self._given_path is None and not Path(path).is_dir():
            raise EngineError(
                f"{self._state.engine} serves a model that cannot be read on this machine",
                found=path,
                remedy="Pass model_path= (a folder or a name that Transformers can load) or topology=",
            )
        config = read_config(path, trust_remote_code=self._trust_remote_code)
        return MoeTopology.from_config(config, load_router_family(self._router_family))

    def current_weights(self) -> CurrentWeights:
        info = self._call("GET", "/model_info")
        with reading_answer(self.url):
            return self._parse_version(info["weight_version"])

    # ---- sampling -----------------------------------------------------------------------------------------------

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        return await self._sample_from(prompt, params, 0)

    async def generate_from(self, prompt: Sequence[int], params: SamplingParams, first_token: int) -> list[Sample]:
        """Return samples like `generate_one`, without routes of the tokens before `first_token`: they are uncovered.

        For a continued sequence: `RouteTrace.continued_by` keeps the routes that its earlier part has already.
        """
        if not 0 <= first_token <= len(prompt):
            raise EngineError(
                "routes can be left out only for tokens of the prompt",
                expected=f"first_token from 0 to {len(prompt)}",
                found=first_token,
            )

        async def limited() -> list[Sample]:
            async with self._semaphore:
                return await self._read_samples(self._sample_from(prompt, params, first_token), prompt, params)

        return await self._loop.run_async(limited())

    async def _sample_from(self, prompt: Sequence[int], params: SamplingParams, first_token: int) -> list[Sample]:
        await self._barrier.wait_until_open()
        self._state.require_ready()
        await asyncio.to_thread(lambda: (self.name, self.topology))  # cached; blocking, so not in this loop
        if params.temperature not in (0.0, 1.0) and not self._temperature_checked:
            await self._check_temperature(int(prompt[0]))
        responses = await self._responses(generate_request(prompt, params, first_token), prompt, params)
        ids = np.asarray(prompt, np.int32)
        samples = [
            GenerateResponse(content, self.name, index).to_sample(
                ids, self.topology, self._parse_version, first_token, with_routes=params.routes
            )
            for index, content in enumerate(responses)
        ]
        self._ledger.check(samples)
        if any(sample.finish_reason is not FinishReason.ABORT for sample in samples):
            # It may have been queued in the server, for weights that are not verified yet.
            await self._barrier.wait_until_open()
            self._state.require_ready()
        return samples * (params.n // params.draws)

    async def _responses(self, request: dict[str, Any], prompt: Sequence[int], params: SamplingParams) -> list[Any]:
        """Return one response per sample. A seeded server uses one seed for all n of a request: they are sent apart."""
        if params.temperature > 0 and self._settings.get("enable_deterministic_inference"):
            sampling = request["sampling_params"]
            separate = [
                request
                | {"sampling_params": sampling | {"n": 1, "sampling_seed": request_seed(prompt, params.seed, number)}}
                for number in range(params.draws)
            ]
            responses = await asyncio.gather(*(self._generate(part) for part in separate))
        elif params.temperature > 0 and params.seed is not None:
            raise EngineError(
                f"{self._state.engine} ignores seeds",
                found=f"seed {params.seed}",
                remedy="Start it with --enable-deterministic-inference, or sample without a seed",
            )
        else:
            responses = await self._generate(request)
            responses = responses if isinstance(responses, list) else [responses]
            if params.routes:
                responses = await asyncio.gather(*(self._not_retracted(response, request) for response in responses))
        if len(responses) != params.draws:
            raise EngineError(f"{self.name} lost samples", expected=params.draws, found=len(responses))
        return responses

    async def _not_retracted(self, response: Any, request: dict[str, Any]) -> Any:
        """Return a response whose routes and log-probs are of one pass: sampled again where it was retracted.

        Deterministic servers compute the same routes the second time; their responses are never sampled again.
        """
        alone = request | {"sampling_params": request["sampling_params"] | {"n": 1}}
        with reading_answer(self.url):
            for attempt in range(RETRACTIONS + 1):
                if attempt:
                    response = await self._generate(alone)
                    response = response[0] if isinstance(response, list) else response
                aborted = response["meta_info"]["finish_reason"]["type"] == "abort"  # it is resumed from its prompt
                if aborted or not was_retracted(response):
                    return response
        raise EngineError(
            f"{self._state.engine} retracted a request again and again: its routes are not those of its log-probs",
            found=f"{RETRACTIONS + 1} attempts",
            remedy="Give it more memory for its cache (--mem-fraction-static) or fewer concurrent requests "
            "(max_concurrent), or start it with --enable-deterministic-inference",
        )

    async def _generate(self, request: dict[str, Any]) -> Any:
        return (await self._post("/generate", request)).json()

    async def _check_temperature(self, token: int) -> None:
        """Raise unless log-probs are at the sampling temperature; a server's environment can change that unreported."""
        gaps = []
        for temperature in (1.0, 2.0):
            sampling = {"max_new_tokens": 1, "temperature": temperature} | NO_PENALTIES
            request = {"input_ids": [token], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 8}
            likeliest = (await self._generate(request))["meta_info"]["output_top_logprobs"][0]
            gaps.append(likeliest[0][0] - likeliest[-1][0])
        if abs(gaps[1] - gaps[0] / 2) > abs(gaps[1] - gaps[0]):
            raise EngineError(
                f"{self._state.engine} reports log-probs of another temperature than it samples at",
                expected=f"differences between tokens half as large at temperature 2 ({gaps[0] / 2:.4g})",
                found=f"{gaps[1]:.4g}",
                remedy="Start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment, or sample at temperature 1",
            )
        self._temperature_checked = True

    def _prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        request = {
            "input_ids": [int(token) for token in token_ids],
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0} | NO_PENALTIES,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = self._call("POST", "/generate", json=request)
        with reading_answer(self.url):
            _, *rest = answer["meta_info"]["input_token_logprobs"]
            if [token for _, token, *_ in rest] != request["input_ids"][1:]:
                raise EngineError(f"{self._state.engine} scored another sequence than it was sent")
            return np.asarray([logprob for logprob, *_ in rest], np.float32)

    # ---- weights ------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None, weights_id: str = "") -> None:
        """Replace all weights: from a folder that the server can read, or an iterator by the way `weights` names.

        SGLang does not detect missing weights: pass a `probe`. The id is part of its version text.
        """
        self._ledger.record(version, weights_id)
        text = version_text(version, weights_id)
        if isinstance(weights, Path) or self._weight_kind == "folder":
            with as_folder(weights, self._shared_folder) as folder, self._updating(version, probe, weights_id):
                update = {"model_path": str(folder.absolute()), "weight_version": text, "flush_cache": True}
                self._command("/update_weights_from_disk", update)
            return
        calls = self._weight_calls
        if self.current_weights() != (self._state.weight_version, self._state.weights_id):
            calls.close()  # it has restarted, and knows no group
        with self._updating(version, probe, weights_id):
            calls.send(weights, version_text(version, INCOMPLETE))
            self._command("/update_weight_version", {"new_version": text, "abort_all_requests": False})

    @cached_property
    def _weight_calls(self) -> WeightCalls:
        def post(path: str, content: dict[str, Any]) -> Any:
            return self._call("POST", path, json=content)

        return WeightCalls(self._weight_kind, self._settings, self.url, post, self._timeout)

    @contextmanager
    def _updating(self, version: int, probe: Probe | None, weights_id: str) -> Iterator[None]:
        """Replace the weights in this context, while the server is paused; then flush its cache and check it."""
        with self._requests_held(), self._state.update_to(version, weights_id):
            with self._generation_paused():
                yield
                self._command("/flush_cache")
            if weights_id:
                self._check_taken(self.current_weights(), version, weights_id)
            if probe is not None:
                probe.check(self._prompt_logprobs(probe.token_ids), str(self.name))

    @contextmanager
    def _requests_held(self) -> Iterator[None]:
        """Hold new requests of this client back."""
        self._barrier.shut()
        try:
            yield
        finally:
            self._barrier.open()

    def _generation_paused(self) -> AbstractContextManager[None]:
        """Abort running requests of all clients; the server holds new ones back."""
        return between(self._command, "/pause_generation", "/continue_generation", {"mode": "abort"})

    def close(self) -> None:
        if "_weight_calls" in vars(self):
            self._weight_calls.close()
        super().close()

    # ---- sleep ---------------------------------------------------------------------------------------------------

    @property
    def _releasable(self) -> list[str]:
        """Memory that can be freed; weights only if SGLang keeps a copy, or they would be garbage after waking."""
        return ["kv_cache", "weights"] if self._settings.get("enable_weights_cpu_backup") else ["kv_cache"]

    def sleep(self, level: int = 1) -> None:
        """Abort running requests and free memory, if the server was started with `--enable-memory-saver`.

        Weights are freed by the server's settings, whatever the level.
        """
        if not self._state.asleep:
            with self._requests_held(), self._generation_paused():
                self._command("/release_memory_occupation", {"tags": self._releasable})
                self._state.asleep = True

    def wake(self) -> None:
        if self._state.asleep:
            self._command("/resume_memory_occupation", {"tags": self._releasable})
            self._state.asleep = False

    def abort(self) -> None:
        """Abort running requests of all clients."""
        self._command("/abort_request", {"abort_all": True})
