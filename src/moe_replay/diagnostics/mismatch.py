"""Mismatch between the log-probs of the same sampled tokens from two passes.

Everything is kept as sums and maxima over tokens, so that micro-batches and ranks combine exactly: a mean is taken
once, at the end, over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SUMS = ("tokens", "k1", "k3", "abs", "ratio", "ratio_squared", "beyond_two")
_MAXIMA = ("abs", "ratio")
NUM_SUMS, NUM_MAXIMA = len(_SUMS), len(_MAXIMA)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums (7,) and maxima (2,) over tokens, float64; `+` combines them, as does an all-reduce of each."""

    sums: Tensor
    maxima: Tensor

    @classmethod
    def between(cls, sampled: Tensor, scored: Tensor, mask: Tensor | None = None) -> Mismatch:
        """Compare tokens sampled with log-probs `sampled` with their scores `scored` in another pass, both (N,).

        With d = scored - sampled and r = exp(d): k1 = -d and k3 = r - 1 - d are unbiased estimates of
        KL(sampled || scored), since the tokens were drawn from `sampled`; `beyond_two` counts max(r, 1/r) > 2.
        """
        difference = (scored.detach() - sampled.detach()).double()
        if mask is not None:
            difference = difference[mask.bool()]
        ratio = difference.exp()
        distance = difference.abs()
        sums = torch.stack(
            [
                torch.ones_like(difference).sum(),
                -difference.sum(),
                (ratio - 1 - difference).sum(),
                distance.sum(),
                ratio.sum(),
                ratio.square().sum(),
                (distance > torch.log(torch.tensor(2.0, dtype=torch.float64))).double().sum(),
            ]
        )
        seen = difference.numel() > 0
        return cls(sums, torch.stack([distance.max(), ratio.max()]) if seen else difference.new_zeros(2))

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def summary(self) -> dict[str, float]:
        """Return means over all tokens, maxima, and the effective sample size as a share; empty without tokens."""
        values = dict(zip(_SUMS, self.sums.tolist(), strict=True))
        largest = dict(zip(_MAXIMA, self.maxima.tolist(), strict=True))
        tokens = values["tokens"]
        if not tokens:
            return {}
        return {
            "k1_kl": values["k1"] / tokens,
            "k3_kl": values["k3"] / tokens,
            "logprob_abs_diff/mean": values["abs"] / tokens,
            "logprob_abs_diff/max": largest["abs"],
            "ratio/mean": values["ratio"] / tokens,
            "ratio/max": largest["ratio"],
            "ess": values["ratio"] ** 2 / (tokens * values["ratio_squared"]),
            "beyond_two": values["beyond_two"] / tokens,
        }
