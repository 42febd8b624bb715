"""slime: `Sample.rollout_routed_experts`.

rows     exactly T-1
layers   every decoder layer, zeros in dense ones
dtype    int32, decoded from SGLang's base64
missing  cannot be expressed
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moe_replay.interop.rows import (
    TokenIds,
    WeightVersion,
    check_rows,
    rows_but_the_last,
    to_array,
    to_ids,
    trace_of_rows,
)
from moe_replay.interop.sglang import int32_rows
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

_SOURCE = "the engine behind slime"


def from_slime(
    rollout_routed_experts: str | np.ndarray | Tensor,
    tokens: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of `Sample.tokens` from `Sample.rollout_routed_experts`, decoded or not."""
    length = len(to_ids(tokens))
    if isinstance(rollout_routed_experts, str):
        rows = int32_rows(rollout_routed_experts, length, topology, "slime", sample)
    else:
        rows = to_array(rollout_routed_experts, "slime", sample)
    check_rows(rows, (length - 1,), "slime", sample, "Sample.tokens and its routes were cut or extended apart")
    return trace_of_rows(rows, tokens, topology, _SOURCE, weight_version=weight_version, sample=sample)


def to_slime(trace: RouteTrace, topology: MoeTopology) -> np.ndarray:
    """(T-1, decoder layers, K) int32. All tokens but the last must have routes."""
    rows = rows_but_the_last(trace, topology, "slime")
    return rows.astype(np.int32)
