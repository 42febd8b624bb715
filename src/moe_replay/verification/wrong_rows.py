"""Rows with wrong routes: runs of tokens, ends of sequences, constant rows, parts that the sequential test refuses."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.verification.agreement import expert_overlap
from moe_replay.verification.alignment_verdict import CERTAIN, FLOOR
from moe_replay.verification.causes import Evidence
from moe_replay.verification.sequential import EvidenceHistory, RowSample, unit_evidence
from moe_replay.verification.shift import chunks, experts_counted

MIN_TOKENS = 4  # of a group that is judged on its own
MIN_INFORMATION = 0.02  # 1 - chance of a layer that is evaluated


class RowScores(NamedTuple):
    """Agreement of native and replayed routes above chance, summed over layers."""

    agreement: Tensor  # (..., R) overlap above chance
    max_agreement: Tensor  # (..., R) its largest possible value; 0 for rows without routes
    top_k: int

    def at_chance(self) -> tuple[Tensor, Tensor]:
        """Return which groups of rows can be judged, and which of them agree no better than chance, (...) bool each.

        A group is the rows of the last dimension. Does not synchronize with the device.
        """
        possible, rows = self.max_agreement.sum(-1), (self.max_agreement > 0).sum(-1)
        level = self.agreement.sum(-1) / possible  # NaN without rows, which compares as False
        residual = torch.addcmul(self.agreement, level[..., None], self.max_agreement, value=-1).square().sum(-1)
        # Adds binomial variance to that of the rows: a few identical rows prove little.
        margin = residual.add(possible, alpha=1 / (4 * self.top_k)).sqrt() * CERTAIN / possible
        judged = (rows >= MIN_TOKENS) & (margin < FLOOR)
        return judged, judged & (level + margin < FLOOR)


def row_scores(native: RouteBatch, replayed: RouteBatch, chance: Tensor) -> RowScores:
    """Score all rows; chance (L,) of each layer, NaN for a layer to skip."""
    agreement = torch.zeros(native.num_rows, dtype=torch.float64)
    max_agreement = torch.zeros_like(agreement)
    for part in chunks(np.arange(len(native.layers)), native.num_rows * native.top_k**2):
        slots = slice(int(part[0]), int(part[-1]) + 1)
        shared = expert_overlap(native.routed_experts[slots], replayed.routed_experts[slots])
        scores = above_chance(shared, replayed.valid[slots], chance[slots], native.top_k)
        agreement += scores.agreement
        max_agreement += scores.max_agreement
    return RowScores(agreement, max_agreement, native.top_k)


def above_chance(shared: Tensor, covered: Tensor, chance: Tensor, top_k: int) -> RowScores:
    """Return the scores (...) of rows that share so much (L, ...) where covered (L, ...); chance (L,) of each layer."""
    chance = chance.view(-1, *[1] * (shared.dim() - 1))
    information = 1 - chance
    informative = covered & (information > MIN_INFORMATION)
    agreement = torch.where(informative, shared - chance, 0).sum(0)
    return RowScores(agreement, torch.where(informative, information, 0).sum(0), top_k)


def misrouted_rows(native: RouteBatch, replayed: RouteBatch, scores: RowScores, starts: np.ndarray) -> np.ndarray:
    """Return which rows have the wrong routes, (R,) bool; `starts` are the bounds of the packed sequences."""
    agreement, max_agreement = scores.agreement.numpy(), scores.max_agreement.numpy()
    misrouted = constant_rows(native, replayed)
    halfway = float(np.clip(agreement.sum() / max(max_agreement.sum(), 1e-9) / 2, 0.1, 0.5))
    for begin, end in pairwise(starts):
        run = _worst_run(halfway * max_agreement[begin:end] - agreement[begin:end])
        if _at_chance(scores, np.arange(begin + run.start, begin + run.stop)):
            misrouted[begin + run.start : begin + run.stop] = True
    covered = max_agreement > 0
    filled = [begin + np.flatnonzero(covered[begin:end]) for begin, end in pairwise(starts)]
    for position in (0, -1):  # conventions differ at the first and last token of a sequence
        ends = np.array([rows[position] for rows in filled if len(rows)], np.int64)
        if _at_chance(scores, ends):
            misrouted[ends] = True
    return misrouted & covered


def constant_rows(native: RouteBatch, replayed: RouteBatch) -> np.ndarray:
    """Return which rows name the same experts in every layer, as rows filled with a constant do, (R,) bool."""
    no_rows = np.zeros(native.num_rows, bool)
    if len(native.layers) < 3:
        return no_rows
    filled = _same_in_all_layers(replayed) & replayed.valid.all(0).numpy()
    in_native = _same_in_all_layers(native)
    return filled & ~in_native if filled.sum() > 2 + 4 * in_native.sum() else no_rows


def _same_in_all_layers(batch: RouteBatch) -> np.ndarray:
    experts = batch.routed_experts.sort(-1).values
    return (experts == experts[:1]).all(-1).all(0).numpy()


def _at_chance(scores: RowScores, rows: np.ndarray) -> bool:
    chosen = torch.from_numpy(rows)
    picked = RowScores(scores.agreement[chosen], scores.max_agreement[chosen], scores.top_k)
    return bool(picked.at_chance()[1])


def _worst_run(missing: np.ndarray) -> slice:
    """Return the run of tokens with the largest sum of `missing` (T,), by Kadane's algorithm."""
    total = np.concatenate([[0.0], np.cumsum(missing)])
    least = np.minimum.accumulate(total)
    stop = int((total - least).argmax())
    start = int(np.flatnonzero(total[: stop + 1] == least[stop])[-1])
    return slice(start, stop)


FALSE_ALARMS = 1e-6  # a call, at most
ROWS = 8192  # of all sequences together, but
ROWS_OF_SEQUENCE = (16, 64)  # minimum and maximum of each
LAYERS = 16
CELLS = 1 << 21  # (layer, alternative, row, expert) compared in one operation
BELOW = 0.5  # of the agreement above chance of the other rows or layers: affected
LEAST = 0.05  # of the rows or layers: fewer that are below do not explain the evidence


class Affected(NamedTuple):
    """Rows (n,) and indices of the layers (l,) whose routes are probably wrong."""

    rows: np.ndarray
    slots: np.ndarray


def affected_parts(evidence: Evidence, layout: TokenLayout) -> Affected | None:
    """Return what the sequential test refuses, None if nothing; evidence has all covered rows and all layers."""
    native, replayed = evidence.native, evidence.replayed
    chance = np.random.default_rng(0)
    layers = sorted(chance.choice(native.layers, min(LAYERS, len(native.layers)), replace=False).tolist())
    count = len(evidence.lengths)
    per_sequence = int(np.clip(ROWS // count, *ROWS_OF_SEQUENCE))
    sample = RowSample.draw(layout, chance, sequences=count, rows=per_sequence * count, allowed=evidence.rows)
    ours, theirs = native.select_layers(layers), replayed.select_layers(layers)
    num_experts = experts_counted(native, replayed)
    history, suspects = EvidenceHistory(), []
    log_wealth, unit_counts = history.log_wealth, history.unit_counts
    cells = (
        ours.routed_experts[:, 0].numel() * sample.rows.shape[1] * (1 + len(sample.alternatives) + len(sample.controls))
    )
    step = max(1, CELLS // cells)
    for first in range(0, len(sample.rows), step):
        part = sample.part(first, first + step)
        tested = unit_evidence(ours, theirs, part, num_experts).summed(torch.from_numpy(part.segments))
        log_wealth, unit_counts = log_wealth + tested.log_wealth.numpy(), unit_counts + tested.unit_counts.numpy()
        suspects.append(tested.suspects.numpy())
    history.add(log_wealth, unit_counts)
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
        of_sequence = evidence.rows[of_row == sample.sequence[unit]]
        halves.append(of_sequence[len(of_sequence) // 2 :] if unit % 2 else of_sequence[: len(of_sequence) // 2])
    return np.sort(np.concatenate(halves))


def _agreement(evidence: Evidence, rows: np.ndarray) -> np.ndarray:
    """Return (L, n): agreement above chance."""
    chance = torch.from_numpy(np.nan_to_num(evidence.chance, nan=1.0))[:, None]
    shared = expert_overlap(evidence.native.routed_experts[:, rows], evidence.replayed.routed_experts[:, rows]) - chance
    return torch.where(evidence.replayed.valid[:, rows], shared, 0).numpy()


def _low(agreement: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the values whose agreement (n,) is far below that of the best; all where hardly any is."""
    low = agreement < BELOW * np.quantile(agreement, 0.9)
    return values[low] if low.sum() > LEAST * len(values) else values
