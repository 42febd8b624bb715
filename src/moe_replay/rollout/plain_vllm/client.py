"""Client that only samples from a plain `vllm serve --enable-return-routed-experts`.

For evaluation, and for weights that something else updates. The engine that also updates them is in `engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from moe_replay.errors import EngineError, EngineName
from moe_replay.rollout.answers import reading_answer, vocabulary_size
from moe_replay.rollout.captured_sample import captured_sample, parse_finish_reason
from moe_replay.rollout.engine import Sampler, StartRequest
from moe_replay.rollout.http import HttpClient
from moe_replay.rollout.model_folder import read_config
from moe_replay.rollout.plain_vllm.wire import no_routes, npy_routes
from moe_replay.rollout.types import Sample, SamplingParams
from moe_replay.routes.router_families import load_router_family
from moe_replay.routes.topology import MoeTopology


def start(request: StartRequest) -> Sampler:
    """Connect to the server at the only one of `request.urls`, which has the model `request.model`."""
    if len(request.urls) != 1:
        raise EngineError("a plain vLLM server is used alone", expected="one URL", found=f"{len(request.urls)} URLs")
    config = read_config(request.model, trust_remote_code=request.trust_remote_code)
    topology = MoeTopology.from_config(config, load_router_family(request.router_family))
    return request.call(
        PlainVllmServer,
        request.urls[0],
        topology=topology,
        model=request.model,
        weight_version=request.weight_version,
        token=request.bearer_token,
        vocab_size=vocabulary_size(request.model),
    )


class PlainVllmServer(HttpClient):
    """vLLM's own OpenAI-compatible server.

    model                name of the model on the server
    topology             of that model: MoeTopology.from_config(AutoConfig.from_pretrained(...))
    processed_logprobs   whether the server was started with `--logprobs-mode processed_logprobs`, which cannot be
                         queried; without it log-probs are right only at temperature 1, top_p 1 and top_k 0
    limits               max_concurrent, timeout and others of `HttpClient`
    """

    def __init__(
        self,
        url: str,
        model: str,
        topology: MoeTopology,
        *,
        processed_logprobs: bool = False,
        weight_version: int = 0,
        token: str | None = None,
        **limits: Any,
    ) -> None:
        super().__init__(url, token=token, **limits)
        self.model = model
        self._topology = topology
        self.weight_version = weight_version
        self.processed_logprobs = processed_logprobs

    @property
    def topology(self) -> MoeTopology:
        return self._topology

    @cached_property
    def name(self) -> EngineName:
        answer = self._call("GET", "/version")
        with reading_answer(self.url):
            return EngineName("vLLM", str(answer["version"]))

    async def _sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        if params.sampling_mask:
            raise EngineError(
                f"vLLM at {self.url} is not asked for sampling masks", remedy="Sample with sampling_mask=False"
            )
        untruncated = (params.temperature, params.top_p, params.top_k) in ((1.0, 1.0, 0), (0.0, 1.0, 0))
        if not untruncated and not self.processed_logprobs:
            raise EngineError(
                "a plain vLLM server reports log-probs of another distribution than it samples from",
                expected="temperature 1, top_p 1, top_k 0",
                found=f"temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}",
                remedy="Start it with --logprobs-mode processed_logprobs and set processed_logprobs=True here",
            )
        request = {
            "model": self.model,
            "prompt": [int(token) for token in prompt],
            "n": params.draws,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": params.seed,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "logprobs": 0,
            "return_token_ids": True,
        }
        response = (await self._post("/v1/completions", request)).json()
        choices = sorted(response["choices"], key=lambda choice: choice["index"])
        if len(choices) != params.draws:
            raise EngineError("vLLM lost samples", expected=params.draws, found=len(choices))
        ids = np.asarray(prompt, np.int32)
        return [self._to_sample(ids, choice) for choice in choices] * (params.n // params.draws)

    def _to_sample(self, prompt: np.ndarray, choice: dict[str, Any]) -> Sample:
        index, engine = choice["index"], EngineName("vLLM", f"at {self.url}")
        if choice.get("prompt_token_ids") not in (None, prompt.tolist()):
            raise EngineError("vLLM continued another prompt than it was sent", sample=index)
        if choice.get("token_ids") is None or choice.get("routed_experts") is None:
            raise no_routes(engine, choice, "token_ids and routed_experts")
        completion = np.asarray(choice["token_ids"], np.int32)
        return captured_sample(
            prompt,
            completion,
            lambda: np.asarray(choice["logprobs"]["token_logprobs"], np.float32),
            npy_routes(choice["routed_experts"], len(prompt) + len(completion), self.topology, index),
            finish_reason=parse_finish_reason(choice["finish_reason"], engine, index),
            topology=self.topology,
            engine=engine,
            weight_version=self.weight_version,
            sample=index,
        )
