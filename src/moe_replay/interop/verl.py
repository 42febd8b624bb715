"""verl: `routed_experts` of a batch.

rows     padded (B, W, L, K), prompts on the left and responses on the right of one boundary; or jagged, T or T-1 each
layers   every decoder layer, zeros in dense ones (rollout); those that route (its own recording, R2)
dtype    that of the engine, or int16
missing  zeros; its trainer masks the last row only
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_replay.interop.rows import (
    PeerError,
    TokenIds,
    by_decoder_layer,
    check_rows,
    covered_prefix,
    decoder_rows,
    to_array,
    to_ids,
    trace_of_rows,
    written_rows,
)
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

_SOURCE = "the engine behind verl"


def from_verl(
    routed_experts: Tensor | Sequence[np.ndarray | Tensor],
    input_ids: Tensor | Sequence[TokenIds],
    attention_mask: Tensor | None = None,
    *,
    topology: MoeTopology,
    weight_version: int = 0,
) -> list[RouteTrace]:
    """Return one trace per sample of a batch: padded with its `attention_mask`, jagged, or lists of samples.

    Zero rows at the end of a sample are uncovered: the last token, and a tool's output that no later turn has read.
    """
    routes = _samples(routed_experts, attention_mask)
    tokens = [to_ids(ids) for ids in _samples(input_ids, attention_mask)]
    if len(routes) != len(tokens):
        raise PeerError("routes and tokens of verl are of different batches", expected=len(tokens), found=len(routes))
    return [
        _one(to_array(rows, "verl", sample), ids, topology, weight_version, sample)
        for sample, (rows, ids) in enumerate(zip(routes, tokens, strict=True))
    ]


def to_verl(traces: Sequence[RouteTrace], topology: MoeTopology, attention_mask: Tensor | None = None) -> Tensor:
    """int16: jagged (B, T, L, K), or padded (B, W, L, K) with rows where `attention_mask` (B, W) has tokens.

    Only tokens at the end of a sample may be without routes, and at top 1, where zeros are a choice, only the last one:
    verl cannot express it for others.
    """
    for sample, trace in enumerate(traces):
        covered = covered_prefix(trace, topology, "verl")
        if topology.top_k == 1 and covered < len(trace) - 1:
            raise PeerError(
                "verl cannot say at top 1 that a token before the last has no route",
                sample=sample,
                token=covered,
                expected=f"routes for the first {len(trace) - 1} tokens",
                found=f"routes for {covered}; zeros for the others would mean expert 0",
                remedy="Let an engine prefill the sequence again, or cut the trace: trace[:length]",
            )
    rows = [torch.from_numpy(decoder_rows(trace, topology).astype(np.int16)) for trace in traces]
    if attention_mask is None:
        if not rows:
            raise PeerError("a jagged batch of verl cannot be empty", expected="at least one trace", found="none")
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    mask = attention_mask.cpu().bool()
    if mask.sum(1).tolist() != [len(trace) for trace in traces]:
        raise PeerError(
            "the attention mask is not that of these traces",
            expected=f"{[len(trace) for trace in traces]} tokens",
            found=mask.sum(1).tolist(),
        )
    padded = torch.zeros((*mask.shape, topology.num_layers, topology.top_k), dtype=torch.int16)
    if rows:
        padded[mask] = torch.cat(rows)
    return padded


def _samples(batch: Tensor | Sequence[TokenIds], mask: Tensor | None) -> list:
    """Return the samples of a batch without their padding."""
    if not isinstance(batch, Tensor):
        return list(batch)
    if batch.is_nested:
        return list(batch.unbind())
    if mask is None or mask.shape != batch.shape[:2]:
        raise PeerError(
            "a padded batch of verl needs its attention mask",
            expected=f"attention_mask {tuple(batch.shape[:2])}",
            found=None if mask is None else tuple(mask.shape),
        )
    return [sample[kept] for sample, kept in zip(batch, mask.bool(), strict=True)]


def _one(
    rows: np.ndarray, token_ids: np.ndarray, topology: MoeTopology, weight_version: int, sample: int
) -> RouteTrace:
    tokens = len(token_ids)
    check_rows(rows, (tokens - 1, tokens), "verl", sample, "Routes must be cut where the response is cut")
    routed = by_decoder_layer(rows[: written_rows(rows, tokens, topology.top_k)], topology)
    return trace_of_rows(routed, token_ids, topology, _SOURCE, weight_version=weight_version, sample=sample)
