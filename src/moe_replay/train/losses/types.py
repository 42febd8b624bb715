"""What a policy loss takes and returns.

Tokens of all sequences of a micro-batch stand in one row of N: a loss sees no padding, packing or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # settings name what is here, and are read without torch
    from torch import Tensor

Level = Literal["token", "sequence"]
Correction = Literal["off", "token_truncate", "token_mask", "sequence_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The N sampled tokens of a micro-batch of S sequences.

    logprobs          (N,) under the policy, with gradient
    old_logprobs      (N,) under the policy before the updates, which importance ratios are taken against
    rollout_logprobs  (N,) as the rollout engine reported them
    ref_logprobs      (N,) under the reference model; None where algorithm.beta is 0
    advantages        (N,) advantage of the token's sequence
    weights           (N,) weight of the token in the whole mini-batch, from `token_weights`; 0 takes the token out
    sequence          (N,) int64: the sequence that each token belongs to
    num_sequences     S
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    ref_logprobs: Tensor | None = None
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of the `algorithm` section; `correction` is the one in force, which replay.mode = "auto" may choose."""

    level: Level = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    correction: Correction = "off"
    correction_low: float = 0.0
    correction_high: float = 2.0


class LossOutput(NamedTuple):
    """Loss of a micro-batch.

    loss            scalar, sum over tokens of weight * loss: those of micro-batches and ranks add up
    token_metrics   name -> (N,), without gradient; logged as loss/<name>, the mean over tokens. A loss returns the same
                    names for every micro-batch
    """

    loss: Tensor
    token_metrics: Mapping[str, Tensor]


Loss = Callable[[LossInputs, LossSettings], LossOutput]
