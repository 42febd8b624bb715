"""Shared by the readers and writers of all projects: rows of expert ids into a checked `RouteTrace`, and back.

The convention of a project is handled in its own file. The functions here take one row for each token that has a
route, with a slice for every decoder layer, as engines report it; `interop.capture` checks those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from moe_replay.errors import EngineError, TraceError
from moe_replay.interop.capture import trace_from_capture
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

TokenIds = Sequence[int] | np.ndarray | Tensor
WeightVersion = int | Sequence[tuple[int, int]]


class PeerError(TraceError):
    """Routes that do not follow the convention of the project named, or that it cannot express."""


def to_array(value: Any, peer: str, sample: int | None = None) -> np.ndarray:
    """Return integers in host memory, from an array, a tensor on any device or nested lists."""
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.dtype.kind not in "iu":
        raise PeerError(f"routes of {peer} must be integers", sample=sample, found=f"{array.dtype} {array.shape}")
    return array


def to_ids(token_ids: TokenIds) -> np.ndarray:
    """(T,) token ids in host memory; the trace checks them."""
    return token_ids.detach().cpu().numpy() if isinstance(token_ids, Tensor) else np.asarray(token_ids)


def check_rows(rows: np.ndarray, allowed: Sequence[int], peer: str, sample: int | None, remedy: str) -> None:
    """Raise unless the rows are (n, layers, K), n being one of `allowed`."""
    if rows.ndim != 3 or len(rows) not in allowed:
        numbers = " or ".join(str(number) for number in sorted(set(allowed)))
        raise PeerError(
            f"routes of {peer} do not fit the tokens",
            sample=sample,
            expected=f"({numbers}, layers, top_k)",
            found=rows.shape,
            remedy=remedy,
        )


def written_rows(rows: np.ndarray, tokens: int, top_k: int) -> int:
    """Return how many leading rows (n, layers, K) hold routes, in a convention that fills up with zeros at the end.

    At top 1 zeros may be a choice, and a sample without any route is an engine that captured nothing: then the last
    token alone may be without one.
    """
    written = np.flatnonzero(rows.any(axis=(1, 2)))
    least = tokens - 1 if top_k == 1 or not written.size else 0
    return max(least, int(written[-1]) + 1 if written.size else 0)


def by_decoder_layer(rows: np.ndarray, topology: MoeTopology) -> np.ndarray:
    """(n, MoE layers, K) -> (n, decoder layers, K), zeros in dense ones; unchanged if it has all layers already."""
    routing = _captured_layers(topology)
    if rows.shape[1] == topology.num_layers or rows.shape[1] != len(routing):
        return rows
    wide = np.zeros((len(rows), topology.num_layers, rows.shape[2]), rows.dtype)
    wide[:, routing] = rows
    return wide


def trace_from_token(
    rows: np.ndarray,
    token_ids: TokenIds,
    topology: MoeTopology,
    source: str,
    first_token: int,
    peer: str,
    *,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of what an engine returned from `first_token` on: a row per token, with or without the last."""
    left = len(to_ids(token_ids)) - first_token
    check_rows(rows, (left - 1, left), peer, sample, "Give all token ids, and the first token that was asked for")
    positions = first_token + np.arange(len(rows))
    return trace_of_rows(
        rows, token_ids, topology, source, positions=positions, weight_version=weight_version, sample=sample
    )


def trace_of_rows(
    rows: np.ndarray,
    token_ids: TokenIds,
    topology: MoeTopology,
    source: str,
    *,
    positions: np.ndarray | None = None,
    weight_version: WeightVersion = 0,
    sample: int | None = None,
) -> RouteTrace:
    """Return the trace of all T tokens; those without a row are uncovered.

    rows        (n, decoder layers, K), zeros in dense layers
    positions   (n,) token that each row belongs to; None: the first n
    """
    ids = to_ids(token_ids)
    rows_at = np.arange(len(rows)) if positions is None else positions
    try:
        routed = trace_from_capture(rows, ids[rows_at], topology, source, sample=sample)
    except EngineError as wrong:  # its token is an index into the rows
        token = int(rows_at[wrong.token]) if isinstance(wrong.token, int) else None
        raise PeerError(
            wrong.problem,
            sample=sample,
            layer=wrong.layer,
            token=token,
            expected=wrong.expected,
            found=wrong.found,
            remedy=wrong.remedy,
        ) from wrong
    experts = np.zeros((len(ids), *routed.experts.shape[1:]), routed.experts.dtype)
    valid = np.zeros(experts.shape[:2], bool)
    experts[rows_at], valid[rows_at] = routed.experts, routed.valid
    return RouteTrace(ids, experts, routed.layers, valid, weight_version, num_experts=topology.num_experts)


def covered_tokens(trace: RouteTrace, topology: MoeTopology, peer: str) -> np.ndarray:
    """(T,) bool: tokens with a route in every layer; a token with routes in some of them cannot be expressed."""
    captured = trace.select_layers(_captured_layers(topology))
    valid = captured.valid
    covered = np.asarray(valid.all(axis=1))
    partly = np.flatnonzero(valid.any(axis=1) & ~covered)
    if partly.size:
        token = int(partly[0])
        raise PeerError(
            f"{peer} cannot say that a token has routes in some layers only",
            layer=captured.layers[int(np.argmin(valid[token]))],
            token=token,
            expected="routes in all layers, or in none",
            found=f"routes in {np.count_nonzero(valid[token])} of {valid.shape[1]}",
        )
    return covered


def covered_prefix(trace: RouteTrace, topology: MoeTopology, peer: str) -> int:
    """Return how many leading tokens have routes; a gap cannot be expressed."""
    covered = covered_tokens(trace, topology, peer)
    count = int(np.count_nonzero(covered))
    if not covered[:count].all():
        raise PeerError(
            f"{peer} cannot say that a token before another with routes has none",
            token=int(np.argmin(covered)),
            expected=f"routes for the first {count} tokens",
            found="a token without a route among them",
            remedy="Its trainer would send such a token to expert 0: let an engine prefill the sequence again",
        )
    return count


def decoder_rows(trace: RouteTrace, topology: MoeTopology) -> np.ndarray:
    """(T, decoder layers, K) as engines report it: zeros in dense layers and for uncovered tokens."""
    layers = _captured_layers(topology)
    rows = np.zeros((len(trace), topology.num_layers, trace.top_k), trace.experts.dtype)
    rows[:, layers] = trace.select_layers(layers).experts
    return rows


def rows_but_the_last(trace: RouteTrace, topology: MoeTopology, peer: str) -> np.ndarray:
    """(T-1, decoder layers, K) as engines return it; all tokens but the last must have routes."""
    count, wanted = covered_prefix(trace, topology, peer), max(len(trace) - 1, 0)
    if count < wanted:
        raise PeerError(
            f"{peer} cannot say that a token before the last has no route",
            token=count,
            expected=f"routes for the first {wanted} tokens",
            found=f"routes for {count}",
            remedy="Cut the trace after the last token with a route: trace[:length]",
        )
    return decoder_rows(trace, topology)[:wanted]


def _captured_layers(topology: MoeTopology) -> list[int]:
    """Return the decoder layers that route; no engine captures routers inside the attention (jetmoe)."""
    return [layer for layer in topology.layers if layer < topology.num_layers]
