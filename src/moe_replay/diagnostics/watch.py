"""`AlignmentWatch`: the shift test in training, on a small sample of what a rank replays in each step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from moe_replay.diagnostics.compare import VerifyReport, compare
from moe_replay.diagnostics.row_scores import row_scores
from moe_replay.diagnostics.shift import HERE, ShiftTable, shift_table
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import PADDING, TokenLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentWatch:
    """The shift test on a small sample of what one rank replays, cheap enough for every step.

    Each step looks at other layers, sequences and tokens. `measure` gives sums; added over micro-batches and ranks
    (`table.vector()` in an all-reduce) they are the same on every rank, and so is `judge(table)`.

    layers      layers looked at on each rank
    sequences   sequences looked at in each micro-batch
    tokens      of each of them
    """

    layers: int = 4
    sequences: int = 8
    tokens: int = 16
    seed: int = 0

    def measure(self, native: RouteBatch, given: RouteBatch, layout: TokenLayout, step: int) -> ShiftTable:
        """The sums of one micro-batch: what `replay(given, observe=True)` would have chosen, and what it was given.

        Nothing waits for the device, if `given` lies there.
        """
        if not native.layers:  # a pipeline stage without routers has nothing to add
            device = native.experts.device
            return ShiftTable.empty(native.source_layers, native.top_k, native.num_experts or 0, device)
        given = _as_replayed(given, native)
        chance = np.random.default_rng([self.seed, step])
        count = min(self.layers, len(native.layers))
        layers = tuple(sorted(chance.choice(native.layers, count, replace=False).tolist()))
        rows, group = self._pick_rows(layout, chance)
        table = shift_table(native, given, layout, rows=rows, layers=layers)
        if not len(rows):
            return table
        places = [table.layers.index(layer) for layer in layers]
        device = native.experts.device
        scores = row_scores(
            native.select_layers(layers),
            given.select_layers(layers),
            table.chance_on_device()[places, HERE],
            torch.from_numpy(rows).to(device),
        )
        judged, lost = scores.at_chance(torch.from_numpy(group).to(device), int(group.max()) + 1)
        return replace(table, sequences=torch.stack([judged.sum(), lost.sum()]).double())

    def explain(self, native: RouteBatch, given: RouteBatch, layout: TokenLayout) -> VerifyReport:
        """The whole comparison on one micro-batch of this rank, to name what `judge` has found. Slow."""
        places = [np.arange(length) for length in layout.lengths]  # positions stand in for token ids
        traces = (batch.to_traces(places, layout, unverified=True) for batch in (native, _as_replayed(given, native)))
        wide = layout.fed.shape[0] > 1 and layout.context_shard is None
        return compare(*traces, width=layout.fed.shape[1] if wide else None)

    def _pick_rows(self, layout: TokenLayout, chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(n,) rows that hold tokens of a few sequences, in order, and which of these sequences each belongs to."""
        held = np.flatnonzero(layout.rows != PADDING)
        sequence = np.searchsorted(layout.starts, layout.rows[held], side="right") - 1
        present = np.unique(sequence)
        chosen = chance.permutation(present)[: self.sequences]
        each = self.sequences * self.tokens // max(len(chosen), 1)
        picked = [chance.permutation(held[sequence == one])[:each] for one in chosen]
        rows = np.concatenate([np.empty(0, np.int64), *picked])
        return rows, np.repeat(np.arange(len(picked)), [len(part) for part in picked])


def _as_replayed(given: RouteBatch, native: RouteBatch) -> RouteBatch:
    """What `replay` made of a batch: the layers that ran, on their device."""
    chosen = given if given.layers == native.layers else given.select_layers(native.layers)
    return chosen if chosen.experts.device == native.experts.device else chosen.to(native.experts.device)
