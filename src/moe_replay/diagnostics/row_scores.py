"""Which rows have lost their routes: runs of tokens, ends of sequences, rows that somebody made up."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_replay.diagnostics.metrics import shared_experts
from moe_replay.diagnostics.verdict import CERTAIN, FLOOR
from moe_replay.routes.batch import RouteBatch

FEWEST_TOKENS = 4  # in a run that is judged by itself
LEAST_INFORMATION = 0.02  # of a layer that is listened to


class RowScores(NamedTuple):
    """For each row, summed over layers: shared experts beyond chance, and the most that this could have been; (R,)."""

    gained: Tensor
    possible: Tensor
    top_k: int

    def lost(self, groups: Tensor, count: int, fewest: int = FEWEST_TOKENS) -> tuple[Tensor, Tensor]:
        """(count,) bool each: groups of rows that were judged, and those that agree no better than chance.

        groups (R,) int64 has the group of each row. Nothing waits for the device.
        """

        def total(values: Tensor) -> Tensor:
            return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, groups, values)

        possible, rows = total(self.possible), total((self.possible > 0).double())
        level = total(self.gained) / possible
        residual = total((self.gained - level[groups].nan_to_num() * self.possible).square())
        # Besides what the rows themselves vary by, as much as coins would: few rows that are alike prove little.
        deviation = (residual + possible / (4 * self.top_k)).sqrt() / possible
        judged = (rows >= fewest) & (CERTAIN * deviation < FLOOR)
        return judged, judged & (level + CERTAIN * deviation < FLOOR)


def row_scores(native: RouteBatch, given: RouteBatch, chance: Tensor, rows: Tensor | None = None) -> RowScores:
    """Scores of all rows, or of `rows` (n,); chance (L,) of each layer, NaN for a layer that is not listened to."""
    count = native.num_rows if rows is None else len(rows)
    gained = torch.zeros(count, dtype=torch.float64, device=native.experts.device)
    possible = torch.zeros_like(gained)
    for slot in range(len(native.layers)):
        pick = slice(None) if rows is None else rows
        heard = given.valid[slot, pick] & (1 - chance[slot] > LEAST_INFORMATION)
        expected = chance[slot].nan_to_num()
        shared = shared_experts(native.experts[slot, pick], given.experts[slot, pick]).double()
        gained += torch.where(heard, shared - expected, 0)
        possible += torch.where(heard, 1 - expected, 0)
    return RowScores(gained, possible, native.top_k)


def lost_rows(native: RouteBatch, given: RouteBatch, scores: RowScores, starts: np.ndarray) -> np.ndarray:
    """(R,) bool: rows whose routes are not theirs. `starts` bounds the sequences, whose tokens follow each other."""
    gained, possible = scores.gained.numpy(), scores.possible.numpy()
    lost = made_up_rows(native, given)
    halfway = float(np.clip(gained.sum() / max(possible.sum(), 1e-9) / 2, 0.1, 0.5))
    for begin, end in pairwise(starts):
        run = _worst_run(halfway * possible[begin:end] - gained[begin:end])
        if _is_lost(scores, np.arange(begin + run.start, begin + run.stop)):
            lost[begin + run.start : begin + run.stop] = True
    covered = possible > 0
    filled = [begin + np.flatnonzero(covered[begin:end]) for begin, end in pairwise(starts)]
    for place in (0, -1):  # the first and the last token of every sequence are where conventions differ
        ends = np.array([rows[place] for rows in filled if len(rows)], np.int64)
        if _is_lost(scores, ends):
            lost[ends] = True
    return lost & covered


def made_up_rows(native: RouteBatch, given: RouteBatch) -> np.ndarray:
    """(R,) bool: rows that name the same experts in every layer, as no router does but filled-in rows do."""
    nothing = np.zeros(native.num_rows, bool)
    if len(native.layers) < 3:
        return nothing
    filled = _alike_in_all_layers(given) & given.valid.all(0).numpy()
    natural = _alike_in_all_layers(native)
    return filled & ~natural if filled.sum() > 2 + 4 * natural.sum() else nothing


def _alike_in_all_layers(batch: RouteBatch) -> np.ndarray:
    experts = batch.experts.sort(-1).values
    return (experts == experts[:1]).all(-1).all(0).numpy()


def _is_lost(scores: RowScores, rows: np.ndarray) -> bool:
    chosen = torch.from_numpy(rows)
    one_group = torch.zeros(len(rows), dtype=torch.int64)
    return bool(RowScores(scores.gained[chosen], scores.possible[chosen], scores.top_k).lost(one_group, 1)[1])


def _worst_run(missing: np.ndarray) -> slice:
    """The run of tokens with the largest sum of `missing` (T,), by Kadane's method."""
    total = np.concatenate([[0.0], np.cumsum(missing)])
    least = np.minimum.accumulate(total)
    stop = int((total - least).argmax())
    start = int(np.flatnonzero(total[: stop + 1] == least[stop])[-1])
    return slice(start, stop)
