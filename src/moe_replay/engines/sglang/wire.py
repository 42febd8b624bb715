"""Requests and responses of SGLang's native `/generate`, strictly validated.

request    return_routed_experts: true, routed_experts_start_len: first row to return
response   meta_info.routed_experts: base64 of int32 (prompt + completion - 1 - start_len, decoder layers, top_k),
           zeros in dense layers
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_replay.engines.requests import parse_finish_reason, prompt_hash, sampled_version
from moe_replay.errors import EngineError, EngineName
from moe_replay.interop.arrays import RouteFormatError
from moe_replay.interop.capture import trace_from_capture, unrouted_trace
from moe_replay.interop.conventions import int32_rows
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from moe_replay.weights.identity import CurrentWeights

NO_PENALTIES = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Sent in every request, since the server has its own defaults."""


def generate_request(prompt: Sequence[int], params: SamplingParams, first_token: int = 0) -> dict[str, Any]:
    """Return the request. Log-probs account for the temperature; for top-k and top-p only with a sampling mask."""
    truncated = params.is_truncated
    if params.sampling_mask:
        raise EngineError(
            "sampling masks of SGLang cannot be replayed",
            remedy="Sample from the whole distribution (top_p 1, top_k 0), accept the bias with "
            'rollout.sampling_mask = "off", or use the Transformers engine or vLLM on a GPU',
        )
    if truncated and not params.top_k:
        raise EngineError(
            "SGLang cannot report log-probs of a distribution truncated by top_p alone",
            expected="top_p 1, or top_k as well",
            found=f"top_p {params.top_p}, top_k {params.top_k}",
            remedy="Set top_k, at most the server's --sampling-mask-max-tokens",
        )
    return {
        "input_ids": [int(token) for token in prompt],
        "sampling_params": {
            "n": params.draws,
            "max_new_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            **NO_PENALTIES,
        },
        "return_logprob": True,
        "return_sampling_mask": truncated,
        **({"return_routed_experts": True, "routed_experts_start_len": first_token} if params.routes else {}),
    }


def request_seed(prompt: Sequence[int], seed: int | None, number: int) -> int:
    """Return the seed of one sample of a prompt; a random one if none is given."""
    if seed is None:
        return secrets.randbits(63)
    return int(
        np.random.SeedSequence([seed, prompt_hash(prompt), number]).generate_state(1, np.uint64)[0] >> np.uint64(1)
    )


def was_retracted(content: dict[str, Any]) -> bool:
    """Whether the server computed a second time what it had sampled: the routes are then not those of the log-probs.

    A request that is retracted, as memory runs out or weights are updated, keeps its tokens and their log-probs. The
    prefix is computed again, and its routes are overwritten (radixark/miles#3277).
    """
    return bool(content["meta_info"].get("num_retractions")) and bool(content["output_ids"])


class GenerateResponse:
    """The response for one sample.

    index   of the sample in its request, for errors
    """

    def __init__(self, content: dict[str, Any], engine: EngineName, index: int) -> None:
        self.meta: dict[str, Any] = content["meta_info"]
        self.output_ids: list[int] = content["output_ids"]
        self.engine = engine
        self.index = index
        self.was_retracted = was_retracted(content)

    def to_sample(
        self,
        prompt: np.ndarray,
        topology: MoeTopology,
        parse_version: Callable[[str], CurrentWeights],
        first_token: int = 0,
        *,
        with_routes: bool = True,
    ) -> Sample:
        """Return the sample, with routes from `first_token` on.

        parse_version   reads a weight version, which is text in SGLang
        with_routes     routes were requested
        """
        if self.meta.get("prompt_tokens", len(prompt)) != len(prompt):
            raise self._error("continued another prompt", expected=len(prompt), found=self.meta["prompt_tokens"])
        reason = parse_finish_reason(self.meta["finish_reason"]["type"], self.engine, self.index)
        # A request that is aborted while queued, also when queued again after preemption, has no routes of what it had
        # sampled by then: it starts from its prompt when it is resumed.
        lacks_routes = with_routes and (self.meta.get("routed_experts") is None or self.was_retracted)
        queued = reason is FinishReason.ABORT and lacks_routes
        completion = np.asarray([] if queued else self.output_ids, np.int32)
        sampled_version(self.meta.get("weight_versions"), str(self.engine), self.index)
        weights = parse_version(self.meta["weight_version"])
        tokens = np.concatenate([prompt, completion])
        if with_routes:
            trace = trace_from_capture(
                None if queued else self._routed_experts(len(tokens), topology),
                tokens,
                topology,
                self.engine,
                weight_version=weights.version,
                first_token=first_token,
                sample=self.index,
            )
        else:
            trace = unrouted_trace(tokens, topology, weights.version)
        return Sample(
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=np.zeros(0, np.float32) if queued else self._logprobs(),
            finish_reason=reason,
            trace=trace,
            weight_version=weights.version,
            weights_id=weights.weights_id,
        )

    def _error(self, problem: str, **facts: Any) -> EngineError:
        return EngineError(f"{self.engine} {problem}", sample=self.index, **facts)

    def _logprobs(self) -> np.ndarray:
        reported = self.meta["output_token_logprobs"]
        if [token for _, token, *_ in reported] != self.output_ids:
            raise self._error(
                "reported log-probs of other tokens than it sampled",
                expected=f"{len(self.output_ids)} tokens",
                found=f"{len(reported)} log-probs",
            )
        truncated = self.meta.get("output_token_sampling_logprobs")
        logprobs = np.asarray([logprob for logprob, *_ in reported] if truncated is None else truncated, np.float32)
        if not np.isfinite(logprobs).all():  # JSON has null for NaN
            raise self._error(
                "computed log-probs that are not finite",
                token=int(np.argmin(np.isfinite(logprobs))),
                remedy="Weights may be missing in its checkpoint, which SGLang does not check: use a probe",
            )
        return logprobs

    def _routed_experts(self, tokens: int, topology: MoeTopology) -> np.ndarray:
        """(rows, decoder layers, K) int32."""
        encoded = self.meta.get("routed_experts")
        if encoded is None:
            raise self._error(
                "returned no routes",
                expected="meta_info.routed_experts",
                found=sorted(self.meta),
                remedy="Start it with --enable-return-routed-experts; a gateway in between must pass "
                "return_routed_experts and meta_info.routed_experts on, and some strip them",
            )
        try:
            return int32_rows(encoded, tokens, topology, str(self.engine), self.index)
        except RouteFormatError as error:
            raise self._error(f"returned {error}") from error
