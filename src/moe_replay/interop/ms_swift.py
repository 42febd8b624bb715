"""ms-swift: `choice.routed_experts` of its rollout server, `OnPolicySample.routed_experts` in its trainer.

rows     T or T-1
layers   every decoder layer, zeros in dense ones
dtype    the engine's; over HTTP {"data": base64, "shape", "dtype", "__ndarray__": True}
missing  cannot be said: its trainer pads with zeros, which means expert 0
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

_SOURCE = EngineName("the engine", "behind ms-swift")


def from_ms_swift(
    routed_experts: Mapping[str, Any] | np.ndarray | Tensor,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """The trace of prompt and completion from a sample's routes, as they are sent or as they are held."""
    tokens = len(to_ids(token_ids))
    rows = sent_or_held(routed_experts, tokens, topology, "ms-swift", sample)
    if rows.ndim == 4 and len(rows) == 1:  # a batch of one
        rows = rows[0]
    check_rows(rows, (tokens - 1, tokens), "ms-swift", sample, "Routes and encoded tokens were cut or extended apart")
    rows = rows[: len(rows) - _last_is_padding(rows, tokens)]
    return trace_of_rows(rows, token_ids, topology, _SOURCE, weight_version=weight_version, sample=sample)


def to_ms_swift(trace: RouteTrace, topology: MoeTopology) -> dict[str, Any]:
    """What its rollout server would have sent: T rows, or T-1 where the last token has no route."""
    count = covered_prefix(trace, topology, "ms-swift")
    rows = decoder_rows(trace, topology)[:count]
    allowed = (len(trace) - 1, len(trace))
    check_rows(rows, allowed, "ms-swift", None, "Only the last token may be without a route")
    return {"data": to_base64(rows), "shape": rows.shape, "dtype": rows.dtype.name, "__ndarray__": True}


def _last_is_padding(rows: np.ndarray, tokens: int) -> bool:
    """Its collator fills the missing last row with zeros: never a route where a row names more than one expert."""
    return len(rows) == tokens > 0 and not rows[-1].any()
