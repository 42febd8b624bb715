"""vLLM's outputs as samples with checked routes, and its sampling masks.

`return_sampling_mask` (vLLM 0.30 on) is an engine argument and holds for all requests of an engine. Such an engine
refuses requests without top_k and greedy ones, so they are sent in an equivalent form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_replay.engines.requests import parse_finish_reason
from moe_replay.engines.vllm.release import WORKING_VERSIONS
from moe_replay.errors import EngineError, EngineName, EngineOptionError
from moe_replay.interop.capture import trace_from_capture, unrouted_trace
from moe_replay.records import FinishReason, Sample, SamplingParams
from moe_replay.routes.topology import MoeTopology
from moe_replay.sampling_mask import SamplingMask
from moe_replay.weights.identity import CurrentWeights

MASK_OPTION = "return_sampling_mask"
_REMEDY = (
    f"Start vLLM 0.30 or later with {MASK_OPTION}; or sample from the whole distribution (top_p 1, top_k 0); "
    'or accept the bias with rollout.sampling_mask = "off"'
)


@dataclass(frozen=True, slots=True)
class OutputReader:
    """Reads the outputs of one engine."""

    engine: EngineName
    topology: MoeTopology
    masks: MaskReturn

    def samples(
        self,
        prompt: Sequence[int],
        outputs: Sequence[Any],
        routed_experts: Sequence[np.ndarray | None],
        weights: CurrentWeights,
        params: SamplingParams,
    ) -> list[Sample]:
        """Return one sample for each of vLLM's completions, with the routes (rows, decoder layers, K) of each."""
        ids = np.asarray(prompt, np.int32)
        return [
            self._sample(ids, output, of_output, weights, params, index)
            for index, (output, of_output) in enumerate(zip(outputs, routed_experts, strict=True))
        ]

    def _sample(
        self,
        prompt: np.ndarray,
        output: Any,
        routed_experts: np.ndarray | None,
        weights: CurrentWeights,
        params: SamplingParams,
        index: int,
    ) -> Sample:
        completion = np.asarray(output.token_ids, np.int32)
        reason = parse_finish_reason(output.finish_reason, self.engine, index)
        aborted_before_prefill = reason is FinishReason.ABORT and not len(completion)
        if routed_experts is None and params.routes and not aborted_before_prefill:
            raise EngineError(f"{self.engine} returned no routes", sample=index, expected=f"vLLM {WORKING_VERSIONS}")
        tokens = np.concatenate([prompt, completion])
        if params.routes:
            trace = trace_from_capture(
                routed_experts, tokens, self.topology, self.engine, weight_version=weights.version, sample=index
            )
        else:
            trace = unrouted_trace(tokens, self.topology, weights.version)
        return Sample(
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=token_logprobs(output.logprobs),
            finish_reason=reason,
            trace=trace,
            weight_version=weights.version,
            weights_id=weights.weights_id or "",
            sampling_mask=self.masks.mask(output, completion, params, index) if params.sampling_mask else None,
        )


def token_logprobs(logprobs: Any) -> np.ndarray:
    """(T,) float32 from vLLM's flat log-probs: the first at each position is the token's; 0 if there is none."""
    if logprobs is None:
        return np.zeros(0, np.float32)
    if logprobs.start_indices == list(range(len(logprobs.logprobs))):  # one at each position, as for samples
        return np.asarray(logprobs.logprobs, np.float32)
    values = np.asarray([*logprobs.logprobs, 0.0], np.float32)
    starts, ends = np.asarray(logprobs.start_indices, int), np.asarray(logprobs.end_indices, int)
    return values[np.where(starts < ends, starts, -1)]


# ---- sampling masks --------------------------------------------------------------------------------------------------


def check_mask_option(engine: EngineName, options: Mapping[str, Any], arguments: type[Any]) -> None:
    """Raise if the options ask for masks and this vLLM cannot return them."""
    if options.get(MASK_OPTION) and MASK_OPTION not in {field.name for field in dataclasses.fields(arguments)}:
        raise EngineOptionError(
            f"{engine} cannot return sampling masks", expected="vLLM 0.30 or later, on a GPU", remedy=_REMEDY
        )


class MaskReturn:
    """Sampling masks of one engine: whether it returns them, and the sampling parameters that requests then need."""

    def __init__(self, engine: EngineName, options: Mapping[str, Any], vocab_size: int) -> None:
        self.is_on = bool(options.get(MASK_OPTION))
        self._engine, self._vocab_size = engine, vocab_size

    def truncation(self, params: SamplingParams) -> dict[str, Any]:
        """Return temperature, top_p and top_k of a request."""
        if params.sampling_mask and not self.is_on:
            raise EngineError(f"{self._engine} was not started to return sampling masks", remedy=_REMEDY)
        if not self.is_on:
            return {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        if params.temperature == 0:
            return {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or self._vocab_size,
        }

    @property
    def scoring(self) -> dict[str, Any]:
        """Further parameters of a request that only scores its prompt; the token that it samples is not used."""
        return {"top_k": 1} if self.is_on else {}

    def mask(self, output: Any, completion: np.ndarray, params: SamplingParams, sample: int) -> SamplingMask:
        """Return the mask of one of vLLM's outputs; for a greedy sample, the whole vocabulary."""
        if params.temperature == 0 or not len(completion):
            return SamplingMask.whole(len(completion), self._vocab_size)
        returned = getattr(output, "sampling_mask", None)
        if returned is None:
            raise EngineError(f"{self._engine} returned no sampling mask", sample=sample, remedy=_REMEDY)
        mask = SamplingMask.of_lists(returned.token_ids, self._vocab_size, sample=sample)
        mask.check_sampled(completion, sample=sample)
        return mask
