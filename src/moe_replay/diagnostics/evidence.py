"""`Evidence`: native and given routes of whole sequences, and how well parts of one explain parts of the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_replay.diagnostics.metrics import shared_experts
from moe_replay.routes.batch import RouteBatch

CELLS = 1 << 22  # ids compared at once


@dataclass(frozen=True, eq=False)
class Evidence:
    """Routes of packed sequences: row r is token r of the concatenated sequences.

    native, given   of the same layers and rows
    starts          (sequences + 1,) where each sequence begins, and where the last ends
    chance          (L,) agreement of routes of the same layer that know nothing of each other
    rows, slots     the rows and the indices of the layers that are wrong
    width           columns of the micro-batch, where sequences were padded to more than the longest
    """

    native: RouteBatch
    given: RouteBatch
    starts: np.ndarray
    chance: np.ndarray
    rows: np.ndarray
    slots: np.ndarray
    width: int | None = None

    @property
    def lengths(self) -> np.ndarray:
        """(sequences,)"""
        return np.diff(self.starts)

    def sample_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the sequence that each row belongs to."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def spread(self, values: np.ndarray, count: int) -> np.ndarray:
        """Return at most `count` of the values, evenly spread."""
        if len(values) <= count:
            return values
        return values[np.linspace(0, len(values) - 1, count).astype(np.int64)]

    def telling_slots(self, count: int) -> np.ndarray:
        """Return at most `count` of the layers that are wrong, those that can tell most."""
        return self.slots[np.argsort(np.nan_to_num(self.chance[self.slots], nan=1.0))[:count]]

    def explained_by(self, rows: np.ndarray, sources: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return (H,): agreement above chance of the routes given to `rows` (n,) with native ones of `sources` (H, n).

        A source of -1 is none, and explains its row no better than chance.
        """
        given = self.given.experts[slots][:, rows]  # (l, n, K)
        valid = self.given.valid[slots][:, rows]
        chance = torch.from_numpy(np.nan_to_num(self.chance[slots], nan=1.0))[:, None, None]
        possible = ((1 - chance) * valid[:, None]).sum().clamp(min=1e-9)
        result = np.empty(len(sources))
        step = max(1, CELLS // max(given.numel() * given.shape[-1], 1))
        for first in range(0, len(sources), step):
            part = torch.from_numpy(sources[first : first + step])
            known = (part >= 0)[None] & valid[:, None]  # (l, h, n)
            shared = shared_experts(given[:, None], self.native.experts[slots][:, part.clamp(min=0)])
            gained = ((shared - chance) * known).sum((0, 2))
            result[first : first + step] = (gained / possible).numpy()
        return result

    def source_layers(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each slot that is wrong, the slot whose native routes explain it best, and how well."""
        best, score = np.empty(len(self.slots), np.int64), np.empty(len(self.slots))
        native = self.native.experts[:, rows]
        own_load = self._load(native, torch.ones(native.shape[:2], dtype=torch.bool))
        for index, slot in enumerate(self.slots):
            valid = self.given.valid[slot, rows]
            given = self.given.experts[slot, rows]
            shared = (shared_experts(given[None], native) * valid).sum(1).double() / valid.sum().clamp(min=1)
            chance = own_load @ self._load(given[None], valid[None])[0] * self.given.top_k
            above = (shared - chance) / (1 - chance).clamp(min=1e-6)
            best[index], score[index] = int(above.argmax()), float(above.max())
        return best, score

    def relabelled(self, rows: np.ndarray) -> float:
        """Return the agreement above chance once the expert ids given to each layer are renamed to fit native routing.

        The names are fitted on every other row and tried on the rest.
        """
        gained = possible = 0.0
        for slot in self.slots:
            valid = self.given.valid[slot, rows].numpy()
            fit, trial = rows[valid][::2], rows[valid][1::2]
            native, given = self.native.experts[slot].long(), self.given.experts[slot].long()
            count = int(max(native.max(), given.max())) + 1
            pairs = native[fit][:, None, :] * count + given[fit][:, :, None]
            together = torch.bincount(pairs.flatten(), minlength=count * count).view(count, count).double()
            expected = together.sum(1, keepdim=True) * together.sum(0, keepdim=True) / together.sum().clamp(min=1)
            name = ((together - expected) / (expected + 1).sqrt()).argmax(0)
            shared = shared_experts(native[trial], name[given[trial]]).double()
            load = self._load(native[None, trial], torch.ones(1, len(trial), dtype=torch.bool))[0]
            renamed = self._load(name[given[None, trial]], torch.ones(1, len(trial), dtype=torch.bool))[0]
            chance = float(load @ renamed) * self.given.top_k
            gained += float(shared.sum()) - chance * len(trial)
            possible += (1 - chance) * len(trial)
        return gained / possible if possible > 0 else 0.0

    def load_distance(self, rows: np.ndarray) -> float:
        """Return how much further given loads are from native ones than halves of each from each other, 0 to 1."""
        native, given = self.native.experts[self.slots], self.given.experts[self.slots]
        valid = self.given.valid[self.slots]
        halves = [self._load(native[:, part], valid[:, part]) for part in (rows[::2], rows[1::2])]
        given_halves = [self._load(given[:, part], valid[:, part]) for part in (rows[::2], rows[1::2])]

        def apart(one: Tensor, other: Tensor) -> float:
            return float((one - other).abs().sum(1).mean()) / 2

        return apart(halves[0], given_halves[1]) - max(apart(*halves), apart(*given_halves))

    def _load(self, experts: Tensor, valid: Tensor) -> Tensor:
        """Return (l, E): the share of all choices (l, n, K) that goes to each expert; every id has a column."""
        count = max(self.native.num_experts or 0, int(self.given.experts.max()) + 1)
        load = torch.zeros(len(experts), count, dtype=torch.float64)
        load.scatter_add_(1, experts.flatten(1).long(), valid[..., None].expand(experts.shape).flatten(1).double())
        return load / load.sum(1, keepdim=True).clamp(min=1)
