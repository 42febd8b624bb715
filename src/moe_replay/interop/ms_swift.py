"""ms-swift: `choice.routed_experts` of its rollout server, `OnPolicySample.routed_experts` in its trainer.

rows     T or T-1
layers   every decoder layer, zeros in dense ones
dtype    the engine's; over HTTP {"data": base64, "shape", "dtype", "__ndarray__": True}
missing  cannot be expressed: its trainer pads with zeros, which means expert 0
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_replay.interop.encoding import PackedRoutes, pack_routes, unpack_routes
from moe_replay.interop.rows import (
    TokenIds,
    WeightVersion,
    check_rows,
    covered_prefix,
    decoder_rows,
    to_ids,
    trace_of_rows,
)
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

_SOURCE = "the engine behind ms-swift"


def from_ms_swift(
    routed_experts: PackedRoutes,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of prompt and completion from the routes of a sample, as sent or as an array."""
    tokens = len(to_ids(token_ids))
    rows = unpack_routes(routed_experts, tokens, topology, "ms-swift", sample)
    if rows.ndim == 4 and len(rows) == 1:  # a batch of one
        rows = rows[0]
    check_rows(rows, (tokens - 1, tokens), "ms-swift", sample, "Routes and encoded tokens were cut or extended apart")
    rows = rows[: len(rows) - _last_is_padding(rows, tokens)]
    return trace_of_rows(rows, token_ids, topology, _SOURCE, weight_version=weight_version, sample=sample)


def to_ms_swift(trace: RouteTrace, topology: MoeTopology) -> dict[str, Any]:
    """Return what its rollout server would send: T rows, or T-1 if the last token has no route."""
    count = covered_prefix(trace, topology, "ms-swift")
    rows = decoder_rows(trace, topology)[:count]
    allowed = (len(trace) - 1, len(trace))
    check_rows(rows, allowed, "ms-swift", None, "Only the last token may be without a route")
    return pack_routes(rows) | {"shape": rows.shape, "__ndarray__": True}


def _last_is_padding(rows: np.ndarray, tokens: int) -> bool:
    """Whether the last row is the collator's padding: zeros, which are no route at top 2 and above."""
    return len(rows) == tokens > 0 and not rows[-1].any()
