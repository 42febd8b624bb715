"""From vLLM's outputs of a finished request to samples with checked routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moe_replay.errors import EngineError, EngineName
from moe_replay.rollout.captured_sample import captured_sample, parse_finish_reason
from moe_replay.rollout.types import FinishReason, Sample, SamplingParams
from moe_replay.rollout.vllm.capture import token_logprobs
from moe_replay.rollout.vllm.masks import MaskReturn
from moe_replay.rollout.vllm.release import WORKING_VERSIONS
from moe_replay.rollout.weights.identity import CurrentWeights
from moe_replay.routes.topology import MoeTopology


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
        routes: Sequence[np.ndarray | None],
        weights: CurrentWeights,
        params: SamplingParams,
    ) -> list[Sample]:
        """Return one sample for each of vLLM's completions, with the routes (rows, decoder layers, K) of each."""
        ids = np.asarray(prompt, np.int32)
        return [
            self._sample(ids, output, captured, weights, params, index)
            for index, (output, captured) in enumerate(zip(outputs, routes, strict=True))
        ]

    def _sample(
        self,
        prompt: np.ndarray,
        output: Any,
        captured: np.ndarray | None,
        weights: CurrentWeights,
        params: SamplingParams,
        index: int,
    ) -> Sample:
        completion = np.asarray(output.token_ids, np.int32)
        reason = parse_finish_reason(output.finish_reason, self.engine, index)
        aborted_before_prefill = reason is FinishReason.ABORT and not len(completion)
        if captured is None and params.routes and not aborted_before_prefill:
            raise EngineError(f"{self.engine} returned no routes", sample=index, expected=f"vLLM {WORKING_VERSIONS}")
        return captured_sample(
            prompt,
            completion,
            lambda: token_logprobs(output.logprobs),
            captured,
            finish_reason=reason,
            topology=self.topology,
            engine=self.engine,
            weight_version=weights.version,
            weights_id=weights.weights_id or "",
            sample=index,
            sampling_mask=partial(self.masks.mask, output, completion, params, index) if params.sampling_mask else None,
            with_routes=params.routes,
        )
