"""vLLM: `routed_experts` of a completion.

rows     prompt + completion - 1, from `routed_experts_prompt_start` on; the last token has none
layers   every decoder layer, zeros in dense ones
dtype    uint8, or uint16 above 256 experts; over HTTP base64 of a .npy file
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moe_replay.interop.encoding import from_base64, from_npy, max_bytes, to_base64, to_npy
from moe_replay.interop.rows import (
    TokenIds,
    WeightVersion,
    rows_but_the_last,
    to_array,
    to_ids,
    trace_from_token,
)
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

_SOURCE = "the vLLM engine"


def from_vllm(
    routed_experts: str | np.ndarray | Tensor,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    first_token: int = 0,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of prompt and completion from what vLLM returned, in process or over HTTP.

    first_token   what was sent as routed_experts_prompt_start: tokens before it are uncovered
    """
    tokens = len(to_ids(token_ids))
    if isinstance(routed_experts, str):
        raw = from_base64(routed_experts, max_bytes(tokens, topology), "vLLM", sample)
        rows = from_npy(raw, "vLLM", sample)
    else:
        rows = to_array(routed_experts, "vLLM", sample)
    return trace_from_token(
        rows, token_ids, topology, _SOURCE, first_token, "vLLM", weight_version=weight_version, sample=sample
    )


def to_vllm(trace: RouteTrace, topology: MoeTopology) -> str:
    """Return what a vLLM server would: base64 of .npy, T-1 rows; all tokens but the last must have routes."""
    rows = rows_but_the_last(trace, topology, "vLLM")
    return to_base64(np.frombuffer(to_npy(rows), np.uint8))
