"""SGLang: `meta_info["routed_experts"]` of `/generate`.

rows     prompt + completion - 1, from `routed_experts_start_len` on; the last token has none
layers   every decoder layer, zeros in dense ones
dtype    int32, always base64 without a shape
"""

from __future__ import annotations

import numpy as np

from moe_replay.interop.encoding import array_of, from_base64, max_bytes, to_base64
from moe_replay.interop.rows import (
    PeerError,
    TokenIds,
    WeightVersion,
    rows_but_the_last,
    to_ids,
    trace_from_token,
)
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

_SOURCE = "the SGLang engine"


def int32_rows(encoded: str, tokens: int, topology: MoeTopology, peer: str, sample: int | None = None) -> np.ndarray:
    """(rows, decoder layers, K) int32 from SGLang's text, for at most `tokens` tokens."""
    raw = from_base64(encoded, max_bytes(tokens, topology), peer, sample)
    row = 4 * topology.num_layers * topology.top_k
    if len(raw) % row:
        raise PeerError(
            f"routes of {peer} are no whole number of rows",
            sample=sample,
            expected=f"a multiple of {row} bytes: int32, {topology.num_layers} layers, top {topology.top_k}",
            found=f"{len(raw)} bytes",
            remedy="They come from another model, or from a version that encodes routes in another way",
        )
    return array_of(raw, "int32", (len(raw) // row, topology.num_layers, topology.top_k), peer, sample)


def from_sglang(
    routed_experts: str,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    first_token: int = 0,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of prompt and completion from what an SGLang server returned.

    first_token   what was sent as routed_experts_start_len: tokens before it are uncovered
    """
    tokens = len(to_ids(token_ids))
    rows = int32_rows(routed_experts, tokens, topology, "SGLang", sample)
    return trace_from_token(
        rows, token_ids, topology, _SOURCE, first_token, "SGLang", weight_version=weight_version, sample=sample
    )


def to_sglang(trace: RouteTrace, topology: MoeTopology) -> str:
    """Return what an SGLang server would return, T-1 rows; all tokens but the last must have routes."""
    rows = rows_but_the_last(trace, topology, "SGLang")
    return to_base64(rows.astype(np.int32))
