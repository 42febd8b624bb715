"""`Probe`: proof that an engine computes with the trainer's weights, on the log-probs of one sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_replay.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Log-probs of one sequence under the trainer's weights.

    token_ids    (T,)
    logprobs     (T - 1,) of every token but the first, at temperature 1
    tolerance    on the median difference: 1e-3 is generous for float32, 0.05 for bfloat16
    """

    token_ids: Sequence[int]
    logprobs: np.ndarray
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or np.shape(self.logprobs) != (len(self.token_ids) - 1,):
            raise EngineError(
                "a probe needs one log-prob for every token but the first",
                expected=f"at least 2 tokens; {max(len(self.token_ids), 2) - 1} log-probs",
                found=f"{len(self.token_ids)} tokens, log-probs of shape {np.shape(self.logprobs)}",
            )
        if not 0 < self.tolerance < math.inf:
            raise EngineError(
                "the tolerance of a probe is out of range", expected="positive and finite", found=self.tolerance
            )

    def check(self, logprobs: np.ndarray, engine: str) -> None:
        """Raise unless the engine's log-probs (T - 1,) are the trainer's.

        The median, because a few tokens go to other experts and differ by much; with wrong weights most tokens do.
        """
        difference = np.abs(np.asarray(logprobs, np.float64) - self.logprobs)
        typical = float(np.median(difference))
        if not typical <= self.tolerance:  # also if it is NaN
            worst = int(difference.argmax())
            raise EngineError(
                f"{engine} does not compute with the weights that it was given",
                token=worst + 1,
                expected=f"log-probs within {self.tolerance} of the trainer's in the median",
                found=f"{typical:.4g} off in the median, {difference[worst]:.4g} at most",
                remedy="The update may have skipped the re-packing of expert weights that the engine does at load; "
                "sampling is refused until an update succeeds",
            )
