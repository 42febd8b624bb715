"""From what an engine captured to a `RouteTrace`, or an error that names the engine and the likely cause.

Engines report one slice for every decoder layer, zeros for dense ones, and no row for the last token. Their capture
buffers have come back empty, shifted, half-written and with ids of physical expert copies, all in the right shape:
everything that can be checked is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_replay.errors import EngineError, EngineName, TraceError
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

_CHANCE_IS_RULED_OUT = 64  # this many consecutive rows of expert 0, at top 1, are no choice of a router


def captured_layers(topology: MoeTopology) -> list[int]:
    """Return the decoder layers that route; no engine captures routers inside the attention (jetmoe)."""
    return [layer for layer in topology.layers if layer < topology.num_layers]


def trace_from_capture(
    routed_experts: np.ndarray | None,
    token_ids: Sequence[int] | np.ndarray,
    topology: MoeTopology,
    engine: EngineName | str,
    *,
    weight_version: int = 0,
    first_token: int = 0,
    sample: int | str | None = None,
) -> RouteTrace:
    """Return the trace of all T tokens from the routes that an engine reports.

    routed_experts   (T - first_token [- 1], decoder layers, K); None: aborted before anything was routed
    engine           name for errors
    first_token      rows before this token were not requested: those tokens are uncovered
    sample           index for errors
    """
    if routed_experts is None:
        return RouteTrace.uncovered(
            token_ids, topology.layers, topology.top_k, weight_version, num_experts=topology.num_experts
        )
    check = _Checks(routed_experts, len(token_ids), first_token, topology, engine, sample)
    check.shape()
    check.dense_layers()
    layers, rows = check.layers, slice(first_token, first_token + len(routed_experts))
    by_token = np.zeros((len(token_ids), len(layers), routed_experts.shape[2]), routed_experts.dtype)
    covered = np.zeros(len(token_ids), bool)
    adjacent = len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1
    of_layers = slice(layers[0], layers[-1] + 1) if adjacent else layers  # a slice is not copied twice
    by_token[rows], covered[rows] = routed_experts[:, of_layers], True
    choices = routed_experts.shape[0] * len(layers) if topology.num_experts > 1 else 0  # a single expert is no choice
    if topology.top_k == 1 and choices >= _CHANCE_IS_RULED_OUT and not by_token.any():
        check.unwritten()
    try:
        trace = RouteTrace(token_ids, by_token, layers, covered, weight_version, num_experts=topology.num_experts)
    except TraceError as error:
        if error.layer is None:  # of the token ids or the version that the caller gives
            raise
        if topology.top_k > 1:
            check.unwritten()  # says more than "a duplicate expert"
        raise check.error(
            f"returned routes that cannot be true: {error.problem}",
            "Ids beyond the experts are those of physical copies that an expert load balancer makes (capture logical "
            "ids, or switch it off); a duplicate expert within a row means a buffer overwritten while it was read",
            layer=error.layer,
            token=error.token,
            expected=error.expected,
            found=error.found,
        ) from error
    return trace if tuple(layers) == topology.layers else trace.with_uncaptured_layers(topology.layers)


@dataclass(frozen=True)
class _Checks:
    """Checks of the capture of one sample."""

    routed_experts: np.ndarray
    tokens: int
    first_token: int
    topology: MoeTopology
    engine: EngineName | str
    sample: int | str | None

    @cached_property
    def layers(self) -> list[int]:
        return captured_layers(self.topology)

    def error(self, problem: str, remedy: str, **facts: object) -> EngineError:
        return EngineError(f"{self.engine} {problem}", sample=self.sample, remedy=remedy, **facts)  # type: ignore[arg-type]

    def shape(self) -> None:
        """Raise unless rows, layers and top-k are those of these tokens and this model."""
        shape, topology = self.routed_experts.shape, self.topology
        if len(shape) != 3 or self.routed_experts.dtype.kind not in "iu":
            raise self.error(
                "returned something else than routes",
                "This version of the engine may encode routes differently: see docs/engines.md",
                expected="integers (rows, decoder layers, top_k)",
                found=f"{self.routed_experts.dtype} {shape}",
            )
        rows, layers, top_k = shape
        if layers != topology.num_layers:
            raise self.error(
                "returned routes of another number of layers",
                _layer_count_cause(layers, topology),
                expected=f"{topology.num_layers} decoder layers, dense ones included",
                found=layers,
            )
        if top_k != topology.top_k:
            raise self.error(
                "returned another number of experts per token",
                "The engine runs another model, or one with another top-k setting",
                expected=f"top {topology.top_k}",
                found=f"top {top_k}",
            )
        needed = self.tokens - self.first_token
        if rows not in (needed, needed - 1):
            raise self.error(
                "returned fewer rows than tokens" if rows < needed else "returned more rows than tokens",
                _row_count_cause(rows, needed),
                expected=f"{needed - 1} or {needed} rows for {self.tokens} tokens from token {self.first_token} on",
                found=f"{rows} rows",
            )

    def dense_layers(self) -> None:
        """Raise unless the capture is zero in dense layers."""
        dense = [layer for layer in range(self.topology.num_layers) if layer not in self.layers]
        of_dense = self.routed_experts[:, dense]
        if of_dense.any():
            row, slot = np.argwhere(of_dense.any(axis=-1))[0].tolist()
            raise self.error(
                "captured routes in a layer that has no router",
                "The layer axis is shifted (counted over MoE layers only), or the router of a draft (MTP) layer wrote "
                "over a layer of the model: switch speculative decoding off",
                layer=dense[slot],
                token=self.first_token + row,
                expected=f"routes in layers {list(self.topology.layers)} only",
                found=self.routed_experts[row, dense[slot]].tolist(),
            )

    def unwritten(self) -> None:
        """Raise if rows were never written, naming which: all, those of a layer, those of the prompt."""
        empty = np.logical_not(self.routed_experts[:, self.layers].any(axis=-1))
        if not empty.any():
            return
        token, slot = np.argwhere(empty)[0].tolist()
        problem, cause = _emptiness(empty, slot, self.layers)
        raise self.error(
            problem,
            cause,
            layer=self.layers[slot],
            token=self.first_token + token,
            expected=f"{self.topology.top_k} distinct experts in every row",
            found=f"zeros in {np.count_nonzero(empty)} of {empty.size} (token, layer) rows",
        )


def _emptiness(empty: np.ndarray, slot: int, layers: list[int]) -> tuple[str, str]:
    """(problem, cause) of rows (tokens, layers) that are zero."""
    if empty.all():
        return (
            "returned an all-zero capture",
            "The capture was never bound to the routers: a fused or monolithic expert kernel, an unsupported backend, "
            "or a release with that bug (vLLM before 0.22)",
        )
    if empty[:, slot].all():
        return (
            f"never captured layer {layers[slot]}",
            "That layer may route by a table of token ids, or by a kernel without capture; declare it with "
            "trace.with_uncaptured_layers only where the trainer routes it natively too",
        )
    by_token = empty.all(axis=1)
    at_the_start = int(np.argmin(by_token))
    if at_the_start and not empty[at_the_start:].any():
        return (
            f"left the first {at_the_start} rows of the capture unwritten",
            "Prompt rows are lost on hybrid models in some releases, and where the prompt's KV cache came from "
            "elsewhere (external KV, prefill/decode disaggregation)",
        )
    return (
        "left rows of the capture unwritten",
        "One rank's shard was taken for the whole batch (data or tensor parallel attention), or the buffer was read "
        "before it was filled",
    )


def _layer_count_cause(layers: int, topology: MoeTopology) -> str:
    if layers == len(topology.layers):
        return "The engine counts MoE layers only: an unknown release, see docs/engines.md"
    if layers > topology.num_layers:
        return "Layers of a draft (MTP) model were captured too, or the engine runs another model"
    return "The engine runs another model, or reports one pipeline stage only"


def _row_count_cause(rows: int, needed: int) -> str:
    if rows > needed:
        return (
            "Routes of a resumed request were appended to the full sequence that came back, or rejected tokens of "
            "speculative decoding were captured"
        )
    if rows == 0:
        return "The request did not ask for routes, or a gateway in between dropped them"
    return (
        "Rows of a cached or transferred prefix were left out (routed_experts_prompt_start, "
        "routed_experts_start_len, external KV), or the capture buffer is too small for the batch"
    )


def unrouted_trace(token_ids: np.ndarray, topology: MoeTopology, weight_version: int) -> RouteTrace:
    """Return the trace of tokens whose routes were not requested: none is covered, and one layer represents all."""
    return RouteTrace.uncovered(token_ids, topology.layers[:1], 1, weight_version)


def is_unrouted(trace: RouteTrace) -> bool:
    """Whether a trace has nothing but its tokens."""
    return len(trace.layers) == 1 and not trace.covered_fraction
