"""Sampling masks of vLLM.

`return_sampling_mask` (vLLM 0.30 on) is an engine argument and holds for all requests of an engine. Such an engine
refuses requests without top_k and greedy ones, so they are sent in an equivalent form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_replay.errors import EngineError, EngineName
from moe_replay.records import SamplingParams
from moe_replay.sampling_mask import SamplingMask

MASK_OPTION = "return_sampling_mask"
_REMEDY = (
    f"Start vLLM 0.30 or later with {MASK_OPTION}; or sample from the whole distribution (top_p 1, top_k 0); "
    'or accept the bias with rollout.sampling_mask = "off"'
)


class MaskReturn:
    """Sampling masks of one engine: whether it returns them, and the sampling parameters that requests then need."""

    def __init__(self, engine: EngineName, options: Mapping[str, Any], vocab_size: int) -> None:
        self.is_on = bool(options.get(MASK_OPTION))
        self._engine, self._vocab_size = engine, vocab_size

    def truncation(self, params: SamplingParams) -> dict[str, Any]:
        if params.sampling_mask and not self.is_on:
            raise EngineError(f"{self._engine} was not started to return sampling masks", remedy=_REMEDY)
        if not self.is_on:
            return {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        if params.temperature == 0:
            return {"temperature": 1.0, "top_p": 1.0, "top_k": 1}
        return {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or self._vocab_size}

    @property
    def scoring(self) -> dict[str, Any]:
        """Further parameters of a request that only scores its prompt; the token that it samples is not used."""
        return {"top_k": 1} if self.is_on else {}

    def mask(self, supports: Any, completion: np.ndarray, params: SamplingParams, sample: int) -> SamplingMask:
        """Return the mask of a sample; for a greedy one, the whole vocabulary.

        supports   of each token, the ids that it could be, as vLLM returns them; None: it has returned none
        """
        if params.temperature == 0 or not len(completion):
            return SamplingMask.whole(len(completion), self._vocab_size)
        if supports is None:
            raise EngineError(f"{self._engine} returned no sampling mask", sample=sample, remedy=_REMEDY)
        mask = SamplingMask.of_lists(supports, self._vocab_size, sample=sample)
        mask.check_sampled(completion, sample=sample)
        return mask
