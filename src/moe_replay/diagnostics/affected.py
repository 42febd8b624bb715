"""The sequential test on whole sequences: faults in some tokens or layers of some sequences, and where they are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from moe_replay.diagnostics.evidence import Evidence
from moe_replay.diagnostics.metrics import shared_experts
from moe_replay.diagnostics.row_sample import RowSample
from moe_replay.diagnostics.sequential import EvidenceHistory, unit_evidence
from moe_replay.routes.layout import TokenLayout

FALSE_ALARMS = 1e-6  # a call, at most
ROWS = 8192  # of all sequences together, but
ROWS_OF_SEQUENCE = (16, 64)  # minimum and maximum of each
LAYERS = 16
CELLS = 1 << 21  # (layer, alternative, row, expert) compared at once
BELOW = 0.5  # of the agreement above chance of the other rows or layers: affected
LEAST = 0.05  # of the rows or layers: fewer that are below do not explain the evidence


class Affected(NamedTuple):
    """Rows (n,) and indices of the layers (l,) whose routes are probably wrong."""

    rows: np.ndarray
    slots: np.ndarray


def affected_parts(evidence: Evidence, layout: TokenLayout) -> Affected | None:
    """Return what the sequential test refuses, None if nothing; evidence has all covered rows and all layers."""
    native, given = evidence.native, evidence.given
    chance = np.random.default_rng(0)
    layers = sorted(chance.choice(native.layers, min(LAYERS, len(native.layers)), replace=False).tolist())
    count = len(evidence.lengths)
    each = int(np.clip(ROWS // count, *ROWS_OF_SEQUENCE))
    sample = RowSample.draw(layout, chance, sequences=count, rows=each * count, allowed=evidence.rows)
    ours, theirs = native.select_layers(layers), given.select_layers(layers)
    num_experts = max(native.num_experts or 0, int(native.experts.max()) + 1, int(given.experts.max()) + 1)
    history, suspects = EvidenceHistory(), []
    capital, tally = history.capital, history.tally
    cells = ours.experts[:, 0].numel() * sample.rows.shape[1] * (1 + len(sample.alternatives) + len(sample.controls))
    step = max(1, CELLS // cells)
    for first in range(0, len(sample.rows), step):
        part = sample.part(first, first + step)
        found = unit_evidence(ours, theirs, part, num_experts).summed(torch.from_numpy(part.segments))
        capital, tally = capital + found.capital.numpy(), tally + found.tally.numpy()
        suspects.append(found.suspects.numpy())
    history.add(capital, tally)
    if history.log10 < -math.log10(FALSE_ALARMS):
        return None
    suspect = np.concatenate(suspects)
    rows = _rows_of_units(evidence, sample, np.flatnonzero(suspect) if suspect.any() else np.arange(len(suspect)))
    part = history.strongest().part
    if "layers" in part:
        return Affected(rows, _low(_agreement(evidence, rows).sum(1), evidence.slots))
    if "rows" in part:
        return Affected(_low(_agreement(evidence, rows).sum(0), rows), evidence.slots)
    return Affected(rows, evidence.slots)


def _rows_of_units(evidence: Evidence, sample: RowSample, units: np.ndarray) -> np.ndarray:
    """Return the covered rows of the halves of sequences that these units were drawn from, in order."""
    of_row = evidence.sample_of(evidence.rows)
    halves = []
    for unit in units:
        own = evidence.rows[of_row == sample.sequence[unit]]
        halves.append(own[len(own) // 2 :] if unit % 2 else own[: len(own) // 2])
    return np.sort(np.concatenate(halves))


def _agreement(evidence: Evidence, rows: np.ndarray) -> np.ndarray:
    """Return (L, n): agreement above chance."""
    chance = torch.from_numpy(np.nan_to_num(evidence.chance, nan=1.0))[:, None]
    shared = shared_experts(evidence.native.experts[:, rows], evidence.given.experts[:, rows]) - chance
    return torch.where(evidence.given.valid[:, rows], shared, 0).numpy()


def _low(agreement: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the values whose agreement (n,) is far below that of the best; all where hardly any is."""
    low = agreement < BELOW * np.quantile(agreement, 0.9)
    return values[low] if low.sum() > LEAST * len(values) else values
