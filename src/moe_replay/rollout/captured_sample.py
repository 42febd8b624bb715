"""What the adapters of all engines share: from the output of an engine to a `Sample`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_replay.errors import EngineError, EngineName
from moe_replay.interop.capture import trace_from_capture
from moe_replay.rollout.sampling_mask import SamplingMask
from moe_replay.rollout.types import FinishReason, Sample, unrouted_trace
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace


def captured_sample(
    prompt: np.ndarray,
    completion: np.ndarray,
    logprobs: Callable[[], np.ndarray],
    captured: np.ndarray | None,
    *,
    finish_reason: FinishReason,
    topology: MoeTopology,
    engine: EngineName,
    weight_version: int,
    sample: int,
    first_token: int = 0,
    weights_id: str = "",
    sampling_mask: Callable[[], SamplingMask] | None = None,
    with_routes: bool = True,
) -> Sample:
    """Return the sample of a prompt (P,), a completion (C,) and the routes that an engine captured.

    logprobs      returns (C,) float32; called after the routes are checked, whose errors tell more
    captured      (P + C - first_token [- 1], decoder layers, K); None: aborted before anything was routed
    first_token   rows before this token were not requested
    sample        index in its request, for errors
    sampling_mask   returns that of the completion; None: the engine was not asked for it
    with_routes   routes were asked for; otherwise `captured` is not read
    """
    tokens = np.concatenate([prompt, completion])
    if not with_routes:
        trace = unrouted_trace(tokens, topology, weight_version)
    elif captured is None:
        trace = RouteTrace.uncovered(
            tokens, topology.layers, topology.top_k, weight_version, num_experts=topology.num_experts
        )
    else:
        trace = trace_from_capture(
            captured, tokens, topology, engine, weight_version=weight_version, first_token=first_token, sample=sample
        )
    mask = None if sampling_mask is None else sampling_mask()
    if mask is not None:
        mask.check_sampled(completion, sample=sample)
    return Sample(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=logprobs(),
        finish_reason=finish_reason,
        trace=trace,
        weight_version=weight_version,
        weights_id=weights_id,
        sampling_mask=mask,
    )


def parse_finish_reason(reason: str | None, engine: EngineName, sample: int) -> FinishReason:
    """Return why an engine ended a sample; a reason that is not one of ours is an error."""
    if reason not in tuple(FinishReason):
        raise EngineError(
            f"{engine} ended a sample for an unknown reason",
            sample=sample,
            expected=", ".join(FinishReason),
            found=reason,
        )
    return FinishReason(reason)
