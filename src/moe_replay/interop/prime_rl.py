"""prime-rl: `routed_experts` of its generate endpoint, and of a `TrainingSample` on the way to its trainer.

rows     endpoint: T-1, from "start" on; trainer: T, with zeros where the engine reported none
layers   every decoder layer, zeros in dense ones
dtype    uint8, or uint16 for more than 256 experts; endpoint: {"data": base64, "shape", "start", "dtype"}; trainer: raw
         bytes, shape and dtype
missing  endpoint: by the number of rows; trainer: zeros at the end, which its model takes for expert 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from moe_replay.interop.encoding import array_of, max_bytes, unpack_routes
from moe_replay.interop.rows import (
    PeerError,
    TokenIds,
    WeightVersion,
    check_rows,
    covered_prefix,
    decoder_rows,
    to_ids,
    trace_from_token,
    trace_of_rows,
    written_rows,
)
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

_PEER = "prime-rl"
_SOURCE = "the engine behind prime-rl"


class RawRoutes(Protocol):
    """Routes as a `TrainingSample` of prime-rl holds them: bytes, and what they mean."""

    @property
    def data(self) -> bytes: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> str: ...


def from_prime_rl(
    routed_experts: Mapping[str, Any] | RawRoutes | np.ndarray | Tensor,
    token_ids: TokenIds,
    topology: MoeTopology,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of a sample: from what the endpoint answered, or from what its trainer gets.

    Zero rows at the end of what the trainer gets are uncovered, e.g. the last token.
    """
    tokens = len(to_ids(token_ids))
    if isinstance(routed_experts, Mapping) and isinstance(routed_experts.get("data"), str):
        rows = unpack_routes(routed_experts, tokens, topology, _PEER, sample)
        first = _start(routed_experts, tokens, sample)
        return trace_from_token(
            rows, token_ids, topology, _SOURCE, first, _PEER, weight_version=weight_version, sample=sample
        )
    rows = _raw_rows(routed_experts, tokens, topology, sample)
    check_rows(rows, (tokens,), _PEER, sample, "Routes must be cut where the tokens are cut")
    rows = rows[: written_rows(rows, tokens, topology.top_k)]
    return trace_of_rows(rows, token_ids, topology, _SOURCE, weight_version=weight_version, sample=sample)


def to_prime_rl(trace: RouteTrace, topology: MoeTopology) -> dict[str, Any]:
    """Return the fields of its `RoutedExperts`: T rows as bytes, zeros for tokens without routes at the end.

    At top 1, where zeros are a choice, only the last token may be without a route.
    """
    covered = covered_prefix(trace, topology, _PEER)
    if topology.top_k == 1 and covered < len(trace) - 1:
        raise PeerError(
            f"{_PEER} cannot say at top 1 that a token before the last has no route",
            token=covered,
            expected=f"routes for the first {len(trace) - 1} tokens",
            found=f"routes for {covered}; zeros for the others would mean expert 0",
            remedy="Let an engine prefill the sequence again, or cut the trace: trace[:length]",
        )
    rows = decoder_rows(trace, topology)
    rows[covered:] = 0
    rows = rows.astype(np.uint8 if topology.num_experts <= 2**8 else "<u2")
    return {"data": rows.tobytes(), "shape": list(rows.shape), "dtype": rows.dtype.name}


def _start(sent: Mapping[str, Any], tokens: int, sample: int | None) -> int:
    start = sent.get("start", 0)
    if type(start) is not int or not 0 <= start <= tokens:
        raise PeerError(
            f"routes of {_PEER} begin at an impossible token",
            sample=sample,
            expected=f"a start of 0 to {tokens}",
            found=repr(start),
        )
    return start


def _raw_rows(routes: Any, tokens: int, topology: MoeTopology, sample: int | None) -> np.ndarray:
    """Return the array in {data: bytes, shape, dtype}, a mapping or an object, or the array itself."""
    if isinstance(routes, np.ndarray | Tensor):
        return unpack_routes(routes, tokens, topology, _PEER, sample)
    parts = routes if isinstance(routes, Mapping) else {name: getattr(routes, name, None) for name in _FIELDS}
    data, shape, dtype = (parts.get(name) for name in _FIELDS)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise PeerError(
            f"routes of {_PEER} are no packed array",
            sample=sample,
            expected="data, shape and dtype",
            found=sorted(name for name, value in parts.items() if value is not None),
        )
    if len(data) > max_bytes(tokens, topology):
        raise PeerError(
            f"routes of {_PEER} are larger than those of these tokens can be",
            sample=sample,
            expected=f"at most {max_bytes(tokens, topology)} bytes",
            found=f"{len(data)} bytes",
        )
    return array_of(bytes(data), dtype, shape, _PEER, sample)


_FIELDS = ("data", "shape", "dtype")
