"""`AlignmentWatch`: alignment tests in training, on a small random sample of what a rank replays in each step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_replay.diagnostics.compare import VerifyReport, compare
from moe_replay.diagnostics.row_sample import RowSample
from moe_replay.diagnostics.row_scores import row_scores
from moe_replay.diagnostics.sequential import unit_evidence
from moe_replay.diagnostics.shift import HERE, ShiftTable, shift_table
from moe_replay.errors import AlignmentError
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.utils.device import to_device


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
        chance = np.random.default_rng([self.seed, step])
        count = min(self.layers, len(native.layers))
        layers = tuple(sorted(chance.choice(native.layers, count, replace=False).tolist()))
        rows = self.sequences * self.tokens
        sample = RowSample.draw(layout, chance, sequences=self.sequences, rows=rows, sampled=sampled)
        picked = sample.rows[sample.present]
        table = shift_table(native, given, layout, rows=picked, layers=layers)
        if not len(picked):
            return table
        device = native.experts.device
        places = to_device(np.searchsorted(table.layers, layers), device)
        ours, theirs = (_selected(batch, layers) for batch in (native, given))
        scores = row_scores(ours, theirs, table.chance_on_device()[places, HERE], to_device(picked, device))
        unit = to_device(np.nonzero(sample.present)[0], device)
        judged, lost = (units.view(-1, 2).any(1).sum() for units in scores.at_chance(unit, len(sample.rows)))
        evidence = unit_evidence(ours, theirs, sample, table.num_experts)
        segment = to_device(sample.segment, device)
        return replace(
            table,
            sequences=torch.stack([judged, lost]).double(),
            capital=evidence.pooled(segment),
            tally=evidence.tally(segment),
        )

    def explain(self, native: RouteBatch, given: RouteBatch, layout: TokenLayout) -> VerifyReport:
        """Return the whole comparison of one micro-batch of this rank, to name what `judge` has found. Slow."""
        places = [np.arange(length) for length in layout.lengths]  # positions stand in for token ids
        traces = (batch.to_traces(places, layout, unverified=True) for batch in (native, _as_replayed(given, native)))
        wide = layout.fed.shape[0] > 1 and layout.context_shard is None
        return compare(*traces, width=layout.fed.shape[1] if wide else None)


def _check_sampled(sampled: np.ndarray | None, layout: TokenLayout) -> None:
    if sampled is not None and (sampled.dtype != bool or sampled.shape != (layout.num_tokens,)):
        raise AlignmentError(
            "`sampled` does not say for each token of the micro-batch whether it was sampled",
            expected=f"bool ({layout.num_tokens},): the tokens of all sequences, concatenated",
            found=f"{sampled.dtype} {sampled.shape}",
        )


def _selected(batch: RouteBatch, layers: tuple[int, ...]) -> RouteBatch:
    """Return `batch.select_layers(layers)` without synchronizing with the device."""
    slots = to_device(np.searchsorted(batch.layers, layers), batch.experts.device)
    all_valid = tuple(batch.all_valid[batch.layers.index(layer)] for layer in layers)
    chosen = {"layers": layers, "experts": batch.experts[slots], "valid": batch.valid[slots], "all_valid": all_valid}
    return replace(batch, **chosen, coverage=None)


def _as_replayed(given: RouteBatch, native: RouteBatch) -> RouteBatch:
    """Return what `replay` made of a batch: the layers that ran, on their device."""
    chosen = given if given.layers == native.layers else given.select_layers(native.layers)
    return chosen if chosen.experts.device == native.experts.device else chosen.to(native.experts.device)
