"""Metrics that are logged beside TRL's own, over the tokens of all micro-batches and ranks since the last log."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_replay.diagnostics.accumulator import MetricAccumulator
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology

PAIRS = ("rollout_vs_old", "rollout_vs_train", "old_vs_train")


class ReplayMetrics:
    """Agreement and coverage of routes, and mismatch of log-probs, under the names of docs/metrics.md."""

    def __init__(self, topology: MoeTopology, device: torch.device) -> None:
        self._accumulator = MetricAccumulator(topology, device, pairs=PAIRS)

    def add_routes(self, recorded: RouteBatch, native: RouteBatch, layout: TokenLayout, *, replayed: bool) -> None:
        """Add the recorded routes of one micro-batch, and those that the model's own routers choose."""
        self._accumulator.add_agreement(recorded, native)
        self._accumulator.add_coverage(recorded, layout, replayed=replayed)
        self._accumulator.add_load(recorded if replayed else native, layout)

    def add_uncovered(self, tokens: int) -> None:
        """Add tokens without a recorded route."""
        self._accumulator.add_uncovered(tokens)

    def add_logprobs(self, pair: str, sampled: Tensor | None, scored: Tensor | None, mask: Tensor) -> None:
        """Add log-probs (B, C) of one micro-batch from two passes; a pass that does not exist, or NaN, is left out."""
        if sampled is None or scored is None:
            return
        known = mask.bool() & ~(sampled.isnan() | scored.isnan())
        self._accumulator.add_logprobs(pair, sampled, scored, known)

    def flush(self) -> dict[str, float]:
        """Return the metrics over all ranks, and start again. All ranks call it."""
        found = self._accumulator.reduce().metrics
        self._accumulator.clear()
        return found
