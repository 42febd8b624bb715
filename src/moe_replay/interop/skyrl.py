"""SkyRL: `routed_experts` of its generate endpoint, `rollout_expert_indices` of a trajectory.

rows     the first n tokens: those that the engine evaluated; a synthetic end token and late observations have none
layers   every decoder layer, zeros in dense ones
dtype    uint8, int16 or int32, the narrowest that holds the largest id; over HTTP {"data": base64, "shape", "dtype"}
missing  by the number of rows; its trainer masks the rest and fills it with 0, 1, ..., K-1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from moe_replay.errors import EngineName
from moe_replay.interop.encoding import sent_or_held, to_base64
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

_SOURCE = EngineName("the engine", "behind SkyRL")


def from_skyrl(
    routed_experts: Mapping[str, Any] | np.ndarray | Tensor,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """The trace of a whole trajectory from the routes of the tokens that it begins with."""
    tokens = len(to_ids(token_ids))
    rows = sent_or_held(routed_experts, tokens, topology, "SkyRL", sample)
    check_rows(rows, range(tokens + 1), "SkyRL", sample, "Routes of several turns must be joined, not appended whole")
    return trace_of_rows(rows, token_ids, topology, _SOURCE, weight_version=weight_version, sample=sample)


def to_skyrl(trace: RouteTrace, topology: MoeTopology) -> dict[str, Any]:
    """What its generate endpoint would have sent: the rows of the tokens that have routes, which must come first."""
    rows = decoder_rows(trace, topology)[: covered_prefix(trace, topology, "SkyRL")]
    dtype = np.uint8 if rows.max(initial=0) < 2**8 else np.int16
    packed = rows.astype(dtype)
    return {"data": to_base64(packed), "shape": list(packed.shape), "dtype": packed.dtype.name}
