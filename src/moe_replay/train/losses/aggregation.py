"""Weights of tokens in the loss of a mini-batch.

Every token carries its weight in the whole mini-batch, so that the losses of micro-batches on all ranks add up, however
the tokens are divided.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Aggregation = Literal["grpo", "dr_grpo", "dapo"]


def token_weights(lengths: np.ndarray, aggregation: Aggregation, max_tokens: int) -> np.ndarray:
    """Return (S,) the weight of each token of a sequence, from the lengths (S,) of all sequences of the mini-batch.

    grpo      mean over the tokens of a sequence, then over sequences
    dapo      mean over all tokens
    dr_grpo   sum over tokens / (sequences * max_tokens), independent of lengths
    """
    total = max(int(lengths.sum()), 1)
    per_token = {
        "grpo": 1.0 / (len(lengths) * np.maximum(lengths, 1)),
        "dapo": np.full(len(lengths), 1.0 / total),
        "dr_grpo": np.full(len(lengths), 1.0 / (len(lengths) * max_tokens)),
    }
    return per_token[aggregation]
