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

    agreement       (R,) share of common experts above chance
    max_agreement   (R,) its largest possible value; 0 for rows without routes
    """

    agreement: Tensor
    max_agreement: Tensor
    top_k: int

    def at_chance(self, groups: Tensor, count: int, min_tokens: int = MIN_TOKENS) -> tuple[Tensor, Tensor]:
        """Return groups with enough rows to be judged, and those that agree no better than chance, (count,) bool each.

        groups   (R,) int64, the group of each row

        Does not synchronize with the device.
        """

        def total(values: Tensor) -> Tensor:
            return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, groups, values)

        possible, rows = total(self.max_agreement), total((self.max_agreement > 0).double())
        level = total(self.agreement) / possible
        residual = total((self.agreement - level[groups].nan_to_num() * self.max_agreement).square())
        # Adds binomial variance to that of the rows: a few identical rows prove little.
        deviation = (residual + possible / (4 * self.top_k)).sqrt() / possible
        judged = (rows >= min_tokens) & (CERTAIN * deviation < FLOOR)
        return judged, judged & (level + CERTAIN * deviation < FLOOR)


def row_scores(native: RouteBatch, given: RouteBatch, chance: Tensor, rows: Tensor | None = None) -> RowScores:
    """Score all rows, or `rows` (n,); chance (L,) of each layer, NaN for a layer to skip."""
    count = native.num_rows if rows is None else len(rows)
    agreement = torch.zeros(count, dtype=torch.float64, device=native.experts.device)
    max_agreement = torch.zeros_like(agreement)
    pick = slice(None) if rows is None else rows
    for part in chunks(np.arange(len(native.layers)), count * native.top_k**2):
        slots = slice(int(part[0]), int(part[-1]) + 1)
        expected = chance[slots].nan_to_num()[:, None]
        informative = given.valid[slots][:, pick] & (1 - chance[slots] > MIN_INFORMATION)[:, None]
        shared = shared_experts(native.experts[slots][:, pick], given.experts[slots][:, pick]).double()
        agreement += torch.where(informative, shared - expected, 0).sum(0)
        max_agreement += torch.where(informative, 1 - expected, 0).sum(0)
    return RowScores(agreement, max_agreement, native.top_k)


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
    one_group = torch.zeros(len(rows), dtype=torch.int64)
    picked = RowScores(scores.agreement[chosen], scores.max_agreement[chosen], scores.top_k)
    return bool(picked.at_chance(one_group, 1)[1])


def _worst_run(missing: np.ndarray) -> slice:
    """Return the run of tokens with the largest sum of `missing` (T,), by Kadane's algorithm."""
    total = np.concatenate([[0.0], np.cumsum(missing)])
    least = np.minimum.accumulate(total)
    stop = int((total - least).argmax())
    start = int(np.flatnonzero(total[: stop + 1] == least[stop])[-1])
    return slice(start, stop)
