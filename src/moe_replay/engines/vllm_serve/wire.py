"""Messages of vLLM's own server: about itself, and of its token-in, token-out route `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_replay.engines.requests import parse_finish_reason, request_seed
from moe_replay.engines.vllm.masks import MASK_OPTION, MaskReturn
from moe_replay.engines.vllm.release import check_no_seed
from moe_replay.errors import EngineAnswerError, EngineError, EngineName
from moe_replay.interop.arrays import RouteFormatError, from_base64, from_npy, max_bytes
from moe_replay.interop.capture import trace_from_capture, unrouted_trace
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from moe_replay.weights.identity import CurrentWeights

PROCESSED = "processed_logprobs"
WORKER_EXTENSION = "moe_replay.engines.vllm.worker.WeightUpdates"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server, as its `/server_info` has them. None: it does not say.

    returns_routes     it was started with `--enable-return-routed-experts`
    logprobs_mode      "processed_logprobs": those of the distribution that is sampled from
    returns_masks      it was started with `--return-sampling-mask`
    max_length         tokens of a sequence at most
    transfer_backend   of its `--weight-transfer-config`
    has_extension      its workers have `WORKER_EXTENSION`
    crashes_on_seeds   it computes on CPU with chunked prefill, where a seed ends its engine
    sleeps             it was started with `--enable-sleep-mode`
    replicas           its data-parallel size
    """

    returns_routes: bool | None = None
    logprobs_mode: str | None = None
    returns_masks: bool = False
    max_length: int | None = None
    transfer_backend: str | None = None
    has_extension: bool = False
    crashes_on_seeds: bool = False
    sleeps: bool = False
    replicas: int = 1

    @classmethod
    def parse(cls, info: Any) -> ServerSettings:
        """Read the answer of `/server_info?config_format=json`; vLLM 0.31 moved the return of routes."""
        config = info["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        chunked = (config.get("scheduler_config") or {}).get("enable_chunked_prefill")
        return cls(
            returns_routes=(config.get("aux_output_config") or model).get("enable_return_routed_experts"),
            logprobs_mode=model.get("logprobs_mode"),
            returns_masks=bool(model.get(MASK_OPTION)),
            max_length=model.get("max_model_len"),
            transfer_backend=(config.get("weight_transfer_config") or {}).get("backend"),
            has_extension=parallel.get("worker_extension_cls") == WORKER_EXTENSION,
            crashes_on_seeds=bool(chunked) and (config.get("device_config") or {}).get("device") == "cpu",
            sleeps=bool(model.get("enable_sleep_mode")),
            replicas=int(parallel.get("data_parallel_size") or 1),
        )

    def check(self, engine: str, max_length: int | None) -> None:
        """Raise if the server cannot be trained with, before anything is sampled.

        max_length   tokens of a sequence of the run at most
        """
        if self.returns_routes is False:
            raise EngineError(
                f"{engine} does not return routes", remedy="Start it with --enable-return-routed-experts (vLLM 0.30 on)"
            )
        if self.logprobs_mode not in (None, PROCESSED):
            raise EngineError(
                f"{engine} reports log-probs of another distribution than it samples from",
                expected=PROCESSED,
                found=self.logprobs_mode,
                remedy=f"Start it with --logprobs-mode {PROCESSED}",
            )
        if max_length is not None and self.max_length is not None and max_length > self.max_length:
            raise EngineError(
                f"{engine} takes shorter sequences than the run has",
                expected=f"{max_length} tokens",
                found=f"--max-model-len {self.max_length}",
                remedy="Start it with a larger --max-model-len, or lower rollout.max_tokens",
            )

    def check_request(self, params: SamplingParams, engine: str) -> None:
        """Raise for a request that the server would answer wrongly, or not survive."""
        plain = (params.temperature, params.top_p, params.top_k) in ((1.0, 1.0, 0), (0.0, 1.0, 0))
        if self.logprobs_mode is None and not plain:
            raise EngineError(
                f"{engine} does not say which log-probs it reports",
                expected="temperature 1, top_p 1, top_k 0",
                found=f"temperature {params.temperature}, top_p {params.top_p}, top_k {params.top_k}",
                remedy=f"Start it with --logprobs-mode {PROCESSED} and VLLM_SERVER_DEV_MODE=1",
            )
        if self.crashes_on_seeds:
            check_no_seed(params, engine)


def generate_request(prompt: Sequence[int], params: SamplingParams, masks: MaskReturn) -> dict[str, Any]:
    """Return a request for `params.draws` samples."""
    return {
        "token_ids": [int(token) for token in prompt],
        "sampling_params": _sampling(prompt, params, masks.truncation(params)) | {"detokenize": False},
        "return_token_ids": True,
    }


def completions_request(model: str, prompt: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """Return a request for `params.draws` samples by the OpenAI route."""
    truncation = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    request = {"model": model, "prompt": [int(token) for token in prompt], "return_token_ids": True}
    return request | _sampling(prompt, params, truncation)


def _sampling(prompt: Sequence[int], params: SamplingParams, truncation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request: all that a server could have a default for, as of the model, is set."""
    return {
        "n": params.draws,
        "max_tokens": params.max_tokens,
        **truncation,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": request_seed(params, prompt),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logprobs": 0,
    }


def sorted_choices(answer: Any, params: SamplingParams, engine: str) -> list[Any]:
    """Return the choices of a response in order; raise if some are missing."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != params.draws:
        raise EngineError(f"{engine} lost samples", expected=params.draws, found=len(choices))
    return choices


def score_request(token_ids: Sequence[int], masks: MaskReturn) -> dict[str, Any]:
    scoring = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False, **masks.scoring}
    return {"token_ids": [int(token) for token in token_ids], "sampling_params": scoring}


def scored_logprobs(answer: Any, token_ids: Sequence[int], engine: str) -> np.ndarray:
    """(T - 1,) float32 from the answer to `score_request`: one entry a position, by the id of its token."""
    entries = answer["prompt_logprobs"]
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise EngineAnswerError(f"{engine} scored another sequence than it was sent", expected=len(token_ids))
    return np.asarray(
        [entry[str(int(token))]["logprob"] for entry, token in zip(entries[1:], token_ids[1:], strict=True)], np.float32
    )


def read_choice(
    choice: Any,
    weights: CurrentWeights,
    prompt: Sequence[int],
    params: SamplingParams,
    engine: EngineName,
    topology: MoeTopology,
    masks: MaskReturn | None = None,
) -> Sample:
    """Return the sample of a choice of a response.

    masks   None: the response has none, and its log-probs are in the form of the OpenAI route
    """
    index = choice["index"]
    if choice.get("prompt_token_ids") not in (None, list(prompt)):
        raise EngineError(f"{engine} continued another prompt than it was sent", sample=index)
    reason = parse_finish_reason(choice["finish_reason"], engine, index)
    encoded, with_routes = choice.get("routed_experts"), params.routes  # which vLLM returns all the same
    if encoded is None and with_routes and reason is not FinishReason.ABORT:
        raise no_routes(engine, choice, "routed_experts")
    if choice.get("token_ids") is None:
        raise no_routes(engine, choice, "token_ids and routed_experts")
    # Without routes, an aborted request starts again from its prompt when it is resumed.
    completion = np.asarray(choice["token_ids"] if encoded is not None or not with_routes else [], np.int32)
    prompt_ids = np.asarray(prompt, np.int32)
    ids = np.concatenate([prompt_ids, completion])
    if with_routes:
        routed_experts = None if encoded is None else npy_routes(encoded, len(ids), topology, index)
        trace = trace_from_capture(routed_experts, ids, topology, engine, weight_version=weights.version, sample=index)
    else:
        trace = unrouted_trace(ids, topology, weights.version)
    mask = None
    if params.sampling_mask and masks is not None:
        mask = masks.mask(choice.get("sampling_mask"), completion, params, index)
    return Sample(
        prompt_ids=prompt_ids,
        completion_ids=completion,
        logprobs=_logprobs(choice, len(completion), engine),
        finish_reason=reason,
        trace=trace,
        weight_version=weights.version,
        weights_id=weights.weights_id,
        sampling_mask=mask,
    )


def no_routes(engine: EngineName, choice: Mapping[str, Any], fields: str) -> EngineError:
    return EngineError(
        f"{engine} returned no routes",
        sample=choice["index"],
        expected=f"{fields} in every choice",
        found=sorted(key for key, value in choice.items() if value is not None),
        remedy="Start it with --enable-return-routed-experts; a gateway in between must pass all fields on",
    )


def _logprobs(choice: Any, tokens: int, engine: EngineName) -> np.ndarray:
    """(C,) float32 of the sampled tokens."""
    if not tokens:
        return np.zeros(0, np.float32)
    returned = choice["logprobs"]
    entries = returned.get("content")
    values = returned["token_logprobs"] if entries is None else [entry["logprob"] for entry in entries]
    logprobs = np.asarray(values, np.float32)
    if len(logprobs) != tokens:
        raise EngineAnswerError(
            f"{engine} returned log-probs of other tokens",
            sample=choice["index"],
            expected=f"{tokens} log-probs",
            found=len(logprobs),
        )
    return logprobs


def npy_routes(encoded: str, tokens: int, topology: MoeTopology, sample: int) -> np.ndarray:
    """Return the array in base64 of a .npy file, which is at most as large as the routes of `tokens` tokens."""
    try:
        return from_npy(from_base64(encoded, max_bytes(tokens, topology), "vLLM", sample), "vLLM", sample)
    except RouteFormatError as error:
        raise EngineError(f"vLLM returned {error}", sample=sample) from error
