"""Rows whose routes are wrong: runs of tokens, ends of sequences, rows filled with constants."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_replay.diagnostics.metrics import shared_experts
from moe_replay.diagnostics.shift import chunks
from moe_replay.diagnostics.verdict import CERTAIN, FLOOR
from moe_replay.routes.batch import RouteBatch

MIN_TOKENS = 4  # of a group that is judged on its own
MIN_INFORMATION = 0.02  # 1 - chance of a layer that is evaluated


class RowScores(NamedTuple):
    """Agreement of native and given routes above chance, summed over layers.

    agreement       (..., R) share of common experts above chance
    max_agreement   (..., R) its largest possible value; 0 for rows without routes
    """

    agreement: Tensor
    max_agreement: Tensor
    top_k: int

    def at_chance(self, min_tokens: int = MIN_TOKENS) -> tuple[Tensor, Tensor]:
        """Return which groups of rows can be judged, and which of them agree no better than chance, (...) bool each.

        A group is the rows of the last dimension. Does not synchronize with the device.
        """
        possible, rows = self.max_agreement.sum(-1), (self.max_agreement > 0).sum(-1)
        level = self.agreement.sum(-1) / possible  # NaN without rows, which compares as False
        residual = torch.addcmul(self.agreement, level[..., None], self.max_agreement, value=-1).square().sum(-1)
        # Adds binomial variance to that of the rows: a few identical rows prove little.
        margin = residual.add(possible, alpha=1 / (4 * self.top_k)).sqrt() * CERTAIN / possible
        judged = (rows >= min_tokens) & (margin < FLOOR)
        return judged, judged & (level + margin < FLOOR)


def row_scores(native: RouteBatch, given: RouteBatch, chance: Tensor) -> RowScores:
    """Score all rows; chance (L,) of each layer, NaN for a layer to skip."""
    agreement = torch.zeros(native.num_rows, dtype=torch.float64)
    max_agreement = torch.zeros_like(agreement)
    for part in chunks(np.arange(len(native.layers)), native.num_rows * native.top_k**2):
        slots = slice(int(part[0]), int(part[-1]) + 1)
        shared = shared_experts(native.experts[slots], given.experts[slots])
        scores = above_chance(shared, given.valid[slots], chance[slots], native.top_k)
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


def misrouted_rows(native: RouteBatch, given: RouteBatch, scores: RowScores, starts: np.ndarray) -> np.ndarray:
    """Return which rows have the wrong routes, (R,) bool; `starts` are the bounds of the packed sequences."""
    agreement, max_agreement = scores.agreement.numpy(), scores.max_agreement.numpy()
    wrong = constant_rows(native, given)
    halfway = float(np.clip(agreement.sum() / max(max_agreement.sum(), 1e-9) / 2, 0.1, 0.5))
    for begin, end in pairwise(starts):
        run = _worst_run(halfway * max_agreement[begin:end] - agreement[begin:end])
        if _at_chance(scores, np.arange(begin + run.start, begin + run.stop)):
            wrong[begin + run.start : begin + run.stop] = True
    covered = max_agreement > 0
    filled = [begin + np.flatnonzero(covered[begin:end]) for begin, end in pairwise(starts)]
    for position in (0, -1):  # conventions differ at the first and last token of a sequence
        ends = np.array([rows[position] for rows in filled if len(rows)], np.int64)
        if _at_chance(scores, ends):
            wrong[ends] = True
    return wrong & covered


def constant_rows(native: RouteBatch, given: RouteBatch) -> np.ndarray:
    """Return which rows name the same experts in every layer, as rows filled with a constant do, (R,) bool."""
    nothing = np.zeros(native.num_rows, bool)
    if len(native.layers) < 3:
        return nothing
    filled = _same_in_all_layers(given) & given.valid.all(0).numpy()
    in_native = _same_in_all_layers(native)
    return filled & ~in_native if filled.sum() > 2 + 4 * in_native.sum() else nothing


def _same_in_all_layers(batch: RouteBatch) -> np.ndarray:
    experts = batch.experts.sort(-1).values
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
