"""`AlignmentWatch`: alignment tests in training, on a small random sample of what a rank replays in each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moe_replay.diagnostics.compare import VerifyReport, compare
from moe_replay.diagnostics.row_sample import RowSample
from moe_replay.diagnostics.row_scores import above_chance
from moe_replay.diagnostics.sampled_routes import SampledRoutes
from moe_replay.diagnostics.sequential import evidence_of
from moe_replay.diagnostics.shift import ShiftTable, check_comparable, experts_counted
from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentWatch:
    """The shift test and the sequential test on a random sample of what one rank replays, cheap enough for every step.

    Each step looks at other layers, sequences and tokens. `measure` returns sums: added over micro-batches and ranks
    (`table.vector()` in an all-reduce) they are the same on every rank, and so is `judge(table, history)`.

    layers      layers looked at on each rank
    sequences   sequences looked at in each micro-batch
    tokens      tokens of each of them, two thirds sampled ones; more where there are fewer sequences
    """

    layers: int = 8
    sequences: int = 8
    tokens: int = 16
    seed: int = 0

    def measure(
        self,
        native: RouteBatch,
        given: RouteBatch,
        layout: TokenLayout,
        step: int,
        sampled: np.ndarray | None = None,
    ) -> ShiftTable:
        """Return the sums of one micro-batch: what its routers would choose (`observe=True`), and what was given.

        sampled   (num_tokens,) bool: which of the layout's concatenated tokens were sampled. They are tested apart from
                  prompts; without it, the second half of each sequence apart from the first

        Does not synchronize with the device, if `given` is there.
        """
        if not native.layers:  # a pipeline stage without routers has nothing to add
            device = native.experts.device
            return ShiftTable.empty(native.source_layers, native.top_k, native.num_experts or 0, device)
        _check_sampled(sampled, layout)
        given = _as_replayed(given, native)
        check_comparable(native, given, layout)
        chance = np.random.default_rng([self.seed, step])
        count = min(self.layers, len(native.layers))
        layers = tuple(sorted(chance.choice(native.layers, count, replace=False).tolist()))
        rows = self.sequences * self.tokens
        sample = RowSample.draw(layout, chance, sequences=self.sequences, rows=rows, sampled=sampled)
        num_experts, model = experts_counted(native, given), (native.source_layers, native.top_k)
        if not sample.rows.size:
            return ShiftTable.empty(*model, num_experts, native.experts.device)
        routes = SampledRoutes.gather(native, given, sample, layers)
        counts = routes.counts(num_experts)
        sums = routes.shift_sums(counts, num_experts)
        shared = counts.in_given[:, 0] / native.top_k
        scores = above_chance(shared, routes.covered, routes.chance(sums), native.top_k)
        evidence = evidence_of(counts, routes.covered[:, None], routes.known, native.top_k).summed(routes.segments)
        units = torch.stack(scores.at_chance())  # two of each sequence
        return ShiftTable(
            *model,
            *routes.spread(sums, len(native.source_layers)),
            sequences=units.unflatten(1, (-1, 2)).any(2).sum(1, dtype=torch.float64),
            capital=evidence.capital,
            tally=evidence.tally,
        )

    def explain(self, native: RouteBatch, given: RouteBatch, layout: TokenLayout) -> VerifyReport:
        """Return the whole comparison of one micro-batch of this rank, to name what `judge` has found. Slow."""
        ids = [np.arange(length) for length in layout.lengths]  # positions stand in for token ids
        traces = (batch.to_traces(ids, layout, unverified=True) for batch in (native, _as_replayed(given, native)))
        wide = layout.fed.shape[0] > 1 and layout.context_shard is None
        return compare(*traces, width=layout.fed.shape[1] if wide else None)


def _check_sampled(sampled: np.ndarray | None, layout: TokenLayout) -> None:
    if sampled is not None and (sampled.dtype != bool or sampled.shape != (layout.num_tokens,)):
        raise AlignmentError(
            "`sampled` does not say for each token of the micro-batch whether it was sampled",
            expected=f"bool ({layout.num_tokens},): the tokens of all sequences, concatenated",
            found=f"{sampled.dtype} {sampled.shape}",
        )


def _as_replayed(given: RouteBatch, native: RouteBatch) -> RouteBatch:
    """Return what `replay` made of a batch: the layers that ran, on their device."""
    chosen = given if given.layers == native.layers else given.select_layers(native.layers)
    return chosen if chosen.experts.device == native.experts.device else chosen.to(native.experts.device)
