"""NeMo-RL: the `routed_experts` envelope of its chat endpoint, `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`.

rows     T; the last one is filled with 0, 1, ..., K-1, whatever the engine knew of it
layers   every decoder layer (vLLM) or those that route (Megatron inference)
dtype    int8, int16 or int32, the narrowest that holds the ids and -1
missing  a row of -1
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from moe_replay.interop.encoding import array_of, from_base64, max_bytes, to_base64
from moe_replay.interop.rows import (
    PeerError,
    TokenIds,
    WeightVersion,
    by_decoder_layer,
    check_rows,
    covered_tokens,
    decoder_rows,
    to_ids,
    trace_of_rows,
)
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

MAGIC = "nrlre1"
MISSING = -1
_DTYPES = ("int8", "int16", "int32")
_SOURCE = "the engine behind NeMo-RL"


def from_nemo_rl(
    routed_experts: str,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of prompt and completion from an envelope; rows of -1 and the last row are uncovered."""
    tokens = len(to_ids(token_ids))
    rows = _open(routed_experts, max_bytes(tokens, topology), sample)
    check_rows(rows, (tokens,), "NeMo-RL", sample, "Give all token ids, prompt and completion")
    marked = rows == MISSING
    missing = marked.all(axis=(1, 2))
    partly = np.flatnonzero(marked.any(axis=(1, 2)) & ~missing)
    if partly.size:
        raise PeerError(
            "routes of NeMo-RL mark a part of a token's row as missing",
            sample=sample,
            token=int(partly[0]),
            expected=f"{MISSING} in all layers of a token, or in none",
            found=rows[partly[0]].tolist(),
        )
    missing[-1:] = True
    positions = np.flatnonzero(~missing)
    routed = by_decoder_layer(rows[positions], topology)
    return trace_of_rows(
        routed, token_ids, topology, _SOURCE, positions=positions, weight_version=weight_version, sample=sample
    )


def to_nemo_rl(trace: RouteTrace, topology: MoeTopology, layers: Literal["decoder", "routing"] = "decoder") -> str:
    """Return the envelope, over all decoder layers or the MoE layers; the route of the last token is lost."""
    covered = covered_tokens(trace, topology, "NeMo-RL")
    dtype = np.int8 if topology.num_experts <= 128 else np.int16
    rows = decoder_rows(trace, topology).astype(dtype)
    if layers == "routing":
        rows = rows[:, [layer for layer in topology.layers if layer < topology.num_layers]]
    rows[~covered] = MISSING
    rows[-1:] = np.arange(rows.shape[2])
    shape = "x".join(str(size) for size in rows.shape)
    return f"{MAGIC}:{rows.dtype.name}:{shape}:{to_base64(rows)}"


def _open(envelope: str, limit: int, sample: int | None) -> np.ndarray:
    """(S, L, K) signed integers."""
    parts = envelope.split(":", 3) if isinstance(envelope, str) else []
    numbers = parts[2].split("x") if len(parts) == 4 else []
    sane = all(number.isascii() and number.isdigit() and len(number) < 10 for number in numbers)
    if len(numbers) != 3 or parts[0] != MAGIC or parts[1] not in _DTYPES or not sane:
        raise PeerError(
            "routes of NeMo-RL are no envelope that is known",
            sample=sample,
            expected=f"{MAGIC}:<{'|'.join(_DTYPES)}>:<S>x<L>x<K>:<base64>",
            found=repr(":".join(parts[:3]) if parts else envelope)[:100],
        )
    raw = from_base64(parts[3], limit, "NeMo-RL", sample)
    return array_of(raw, parts[1], [int(number) for number in numbers], "NeMo-RL", sample)
