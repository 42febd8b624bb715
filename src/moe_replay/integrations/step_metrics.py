"""`StepMetrics`: how well replay works inside another trainer, as numbers among its own, and the alignment check."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_replay.integrations.hosts import ReplaySettings
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.verification.metrics import MetricAccumulator
from moe_replay.verification.watch import AlignmentCheck

PREFIX = "moe_replay/"  # no name below contains "min" or "max", by which verl chooses how to reduce
_LAYER = "routing/agreement/layer_"
_NAMES = {
    "routing/agreement": "agreement",
    "routing/replayed_fraction": "replayed",
    "mismatch/replayed/k3_kl": "k3",
    "mismatch/native/k3_kl": "k3_native",
    "mismatch/paired/k3_kl": "k3_paired",
    "samples_without_routes": "samples_without_routes",
}


class StepMetrics:
    """Sums of one rank over the micro-batches of a pass; `finish` adds those of all ranks."""

    def __init__(self, topology: MoeTopology, device: torch.device, settings: ReplaySettings) -> None:
        self._device = device
        self._sums = MetricAccumulator(
            topology, device, totals=("samples_without_routes",), pairs=("replayed", "native", "paired")
        )
        self._alignment = AlignmentCheck(topology, device, on_misalignment=settings.on_misalignment)
        self._settings = settings
        self._compared: Tensor | None = None  # log-probs of the rollout in the micro-batch that ran without replay too
        self._scorings = 0
        self._updates = 0

    def checks(self, *, is_update: bool) -> bool:
        """Whether the routes of this pass are compared with native ones. Counted apart: only updates report."""
        done = self._updates if is_update else self._scorings
        return self._settings.check_every > 0 and done % self._settings.check_every == 0

    @property
    def compares(self) -> bool:
        """Whether log-probs without replay are wanted in this update."""
        return self._settings.compare_every > 0 and self._updates % self._settings.compare_every == 0

    def add_routes(
        self, replayed: RouteBatch, native: RouteBatch | None, layout: TokenLayout, sampled: np.ndarray | None = None
    ) -> None:
        """Add what a micro-batch has replayed, and native choices where they were observed."""
        self._sums.add_coverage(replayed, layout, replayed=True)
        if native is not None:
            self._sums.add_agreement(replayed, native)
            self._alignment.add(native, replayed, layout, self._scorings + self._updates, sampled)

    def add_samples(self, without_routes: Sequence[bool]) -> None:
        """Count the samples of a micro-batch that have no routes at all."""
        count = torch.full((), float(sum(without_routes)), device=self._device)
        self._sums.add_total("samples_without_routes", count)

    def add_logprobs(self, sampled: Tensor, scored: Tensor, mask: Tensor, *, replayed: bool) -> None:
        """Add log-probs (B, R) of the rollout and of this trainer, with replay or without.

        A micro-batch that runs both ways runs without replay first. The k3 of a few thousand tokens depends on a few of
        them, so the one without replay is comparable with that of the same tokens only.
        """
        self._sums.add_logprobs("replayed" if replayed else "native", sampled, scored, mask)
        if not replayed:
            self._compared = sampled
        elif self._compared is not None and torch.equal(self._compared, sampled):
            self._sums.add_logprobs("paired", sampled, scored, mask)

    def finish(self, *, is_update: bool, report_tokens: bool = True) -> dict[str, float]:
        """Return the metrics of the pass. Collective: call on every rank; misaligned routes raise on all of them.

        report_tokens   whether samples and log-probs of this rank count: only one of the ranks that share them may
        """
        metrics: dict[str, float] = {}
        if self.checks(is_update=is_update):
            verdict = self._alignment.check()
            metrics["evidence"] = round(self._alignment.evidence, 2)
            if verdict.status != "unclear":
                metrics["aligned"] = verdict.metric
        if is_update:
            metrics |= self._reduced(report_tokens)
            self._updates += 1
        else:
            self._scorings += 1
        self._sums.clear()
        self._compared = None
        return {PREFIX + name: value for name, value in metrics.items()}

    def _reduced(self, report_tokens: bool) -> dict[str, float]:
        metrics = self._sums.reduce(report_tokens=report_tokens).metrics
        reported = {_NAMES[name]: value for name, value in metrics.items() if name in _NAMES}
        if "routing/unrouted_fraction" in metrics:
            reported["covered"] = 1 - metrics["routing/unrouted_fraction"]
        by_layer = {name: value for name, value in metrics.items() if name.startswith(_LAYER)}
        if by_layer:
            worst = min(by_layer, key=by_layer.__getitem__)
            reported["worst_agreement"] = by_layer[worst]
            reported["worst_layer"] = float(worst.removeprefix(_LAYER))
        return reported
