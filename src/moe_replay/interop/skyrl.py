"""SkyRL: `routed_experts` of its generate endpoint, `rollout_expert_indices` of a trajectory.

rows     the first n tokens: those that the engine evaluated; a synthetic end token and late observations have none
layers   every decoder layer, zeros in dense ones
dtype    uint8, int16 or int32, the narrowest that holds the largest id; over HTTP {"data": base64, "shape", "dtype"}
missing  by the number of rows; its trainer masks the rest and fills it with 0, 1, ..., K-1
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

_SOURCE = "the engine behind SkyRL"


def from_skyrl(
    routed_experts: PackedRoutes,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of a whole trajectory from the routes of its first tokens."""
    tokens = len(to_ids(token_ids))
    rows = unpack_routes(routed_experts, tokens, topology, "SkyRL", sample)
    check_rows(rows, range(tokens + 1), "SkyRL", sample, "Routes of several turns must be joined, not appended whole")
    return trace_of_rows(rows, token_ids, topology, _SOURCE, weight_version=weight_version, sample=sample)


def to_skyrl(trace: RouteTrace, topology: MoeTopology) -> dict[str, Any]:
    """Return what its generate endpoint would send: rows of the tokens with routes, which must come first."""
    rows = decoder_rows(trace, topology)[: covered_prefix(trace, topology, "SkyRL")]
    return pack_routes(rows.astype(np.uint8 if rows.max(initial=0) < 2**8 else np.int16))
