"""What is logged beside TRL's own numbers: sums over tokens since the last log, over all micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_replay.diagnostics.metrics import same_experts
from moe_replay.diagnostics.mismatch import Mismatch
from moe_replay.routes.batch import RouteBatch

PAIRS = ("rollout_vs_old", "rollout_vs_train", "old_vs_train")
Gather = Callable[[Tensor], Tensor]


class RunningNumbers:
    """Counts of routes by layer, and how far log-probs are apart. Nothing waits for the device until `summary`."""

    def __init__(self, layers: Sequence[int], device: torch.device) -> None:
        self.layers = tuple(layers)
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        zeros = torch.zeros(len(self.layers), dtype=torch.float64, device=self._device)
        self._agreeing, self._covered = zeros, zeros.clone()
        self._tokens = self._replayed = 0
        nothing = Mismatch(zeros.new_zeros(7), zeros.new_zeros(2))
        self._mismatch = dict.fromkeys(PAIRS, nothing)

    def add_routes(self, recorded: RouteBatch, native: RouteBatch, *, replayed: bool) -> None:
        """One micro-batch: the routes that were recorded, and those that the model's own routers choose."""
        self._agreeing = self._agreeing + (same_experts(recorded, native) & recorded.valid).sum(1)
        self._covered = self._covered + recorded.valid.sum(1)
        if recorded.coverage is not None:
            self._tokens += recorded.coverage.token_rows
            self._replayed += recorded.coverage.replayed if replayed else 0

    def add_unrouted(self, tokens: int) -> None:
        """Tokens of which nobody knows where they went."""
        self._tokens += tokens

    def add_logprobs(self, pair: str, sampled: Tensor | None, scored: Tensor | None, mask: Tensor) -> None:
        """One micro-batch (B, C); a pair of which one side does not exist, or is not a number, counts nothing."""
        if sampled is None or scored is None:
            return
        known = mask.bool() & ~(sampled.isnan() | scored.isnan())
        self._mismatch[pair] = self._mismatch[pair] + Mismatch.between(sampled, scored, known)

    def summary(self, gather: Gather) -> dict[str, float]:
        """Numbers over all ranks; `gather` concatenates the (1, N) tensors of all ranks."""
        counts = torch.tensor([self._tokens, self._replayed], dtype=torch.float64, device=self._device)
        parts = [self._agreeing, self._covered, counts, *(self._mismatch[pair].sums for pair in PAIRS)]
        sums = gather(torch.cat(parts)[None]).sum(0)
        maxima = gather(torch.cat([self._mismatch[pair].maxima for pair in PAIRS])[None]).amax(0)

        found = {}
        agreeing, covered, counts, *of_pairs = sums.split([part.numel() for part in parts])
        for pair, pair_sums, pair_maxima in zip(PAIRS, of_pairs, maxima.view(len(PAIRS), -1), strict=True):
            values = Mismatch(pair_sums, pair_maxima).summary()
            found |= {f"mismatch/{pair}/{name}": value for name, value in values.items()}
        return self._routing(agreeing.cpu(), covered.cpu(), *counts.tolist()) | found

    def _routing(self, agreeing: Tensor, covered: Tensor, tokens: float, replayed: float) -> dict[str, float]:
        if not tokens:
            return {}
        every = tokens * len(self.layers)
        found = {
            "routing/replayed_fraction": replayed / every,
            "routing/unrouted_fraction": 1 - float(covered.sum()) / every,
        }
        if covered.sum() > 0:
            found["routing/agreement"] = float(agreeing.sum() / covered.sum())
        for layer, same, of in zip(self.layers, agreeing.tolist(), covered.tolist(), strict=True):
            if of:
                found[f"routing/agreement/layer_{layer}"] = same / of
        return found
