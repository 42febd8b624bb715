"""The records of a rollout: what an engine is given and what it returns, up to the finished sequence.

Engines differ in rows, layers, dtypes and encodings of the routes that they report. Their adapters turn all of them
into one form, a `Sample` with a checked `RouteTrace`, or raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from moe_replay.errors import EngineError
from moe_replay.rollout.sampling_mask import SamplingMask
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace


class FinishReason(StrEnum):
    """Why a sample ended: a stop token, the maximum length, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Log-probs are those of the distribution sampled from, temperature included.

    n                samples per prompt
    max_tokens       new tokens at most
    temperature      0 is greedy
    top_p, top_k     1 and 0 disable them
    stop_token_ids   end a sample; the stop token is part of the completion
    ignore_eos       do not stop at the model's own end-of-sequence token
    seed             None: not reproducible
    sampling_mask    return the support that each token was sampled from; engines that cannot refuse
    routes           return routes; without them, traces cover no token (`unrouted_trace`)
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    sampling_mask: bool = False
    routes: bool = True

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are sampled from a part of the distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    @property
    def draws(self) -> int:
        """Number of samples to draw: greedy ones are identical, and some engines refuse to draw them twice."""
        return self.n if self.temperature > 0 else 1

    def __post_init__(self) -> None:
        checks = {
            "n": self.n >= 1,
            "max_tokens": 1 <= self.max_tokens < 2**31,
            "temperature": 0 <= self.temperature < math.inf,
            "top_p": 0 < self.top_p <= 1,
            "top_k": 0 <= self.top_k < 2**31,
            "seed": self.seed is None or 0 <= self.seed < 2**63,
        }
        for name, fine in checks.items():
            if not fine:
                raise EngineError(f"sampling parameter {name} is out of range", found=getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One completion of one prompt.

    prompt_ids       (P,) int32
    completion_ids   (C,) int32, including the stop token
    logprobs         (C,) float32 of the sampled tokens, at the sampling temperature
    trace            routes of all P + C tokens; tokens that were not routed (the last one) are uncovered
    weight_version   of the weights that sampled the last token; the trace has one for every token
    weights_id       of the update that those weights come from (`weights/identity.py`); empty: of none
    sampling_mask    of the C tokens, where it was asked for
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    trace: RouteTrace
    weight_version: int
    info: dict[str, str] = field(default_factory=dict)
    weights_id: str = ""
    sampling_mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        prompt, completion = len(self.prompt_ids), len(self.completion_ids)
        if self.sampling_mask is not None:
            self.sampling_mask.check_sampled(self.completion_ids)
        if len(self.logprobs) != completion:
            raise EngineError("a sample needs one log-prob per token", expected=completion, found=len(self.logprobs))
        tokens = np.concatenate([self.prompt_ids, self.completion_ids])
        if len(self.trace) != prompt + completion or not np.array_equal(self.trace.token_ids, tokens):
            raise EngineError(
                "the trace of a sample is of other tokens than the sample",
                expected=f"{prompt} + {completion} tokens",
                found=self.trace,
            )


def unrouted_trace(tokens: np.ndarray, topology: MoeTopology, weight_version: int) -> RouteTrace:
    """Return the trace of tokens whose routes were not asked for: none is covered, and one layer represents all."""
    return RouteTrace.uncovered(tokens, topology.layers[:1], 1, weight_version)


def is_unrouted(trace: RouteTrace) -> bool:
    """Return whether a trace has nothing but its tokens."""
    return len(trace.layers) == 1 and not trace.covered_fraction


NOT_SAMPLED = -1
"""In place of a weight version, for tokens that the model did not sample: prompts and observations."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledSequence:
    """One finished sequence of T tokens, of one turn or several: prompt, completions and observations.

    token_ids       (T,) int32
    logprobs        (T,) float32: of the sampled tokens, under the weights that sampled them; 0 elsewhere
    versions        (T,) int64: weight version that sampled the token, `NOT_SAMPLED` for prompt and observations
    trace           routes of the T tokens, with the weight version that routed each
    finish_reason   of the last turn
    sampling_mask   of the T tokens, the whole vocabulary where nothing was sampled; None: nothing was cut off, or the
                    engine was not asked
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    trace: RouteTrace
    finish_reason: FinishReason
    sampling_mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        if self.sampling_mask is not None:
            self.sampling_mask.check_sampled(self.token_ids)
        lengths = (len(self.logprobs), len(self.versions), len(self.trace))
        if set(lengths) != {len(self.token_ids)}:
            raise EngineError(
                "log-probs, versions and routes of a sequence must have one entry per token",
                expected=f"{len(self.token_ids)} each",
                found=", ".join(map(str, lengths)),
            )
        if not np.array_equal(self.trace.token_ids, self.token_ids):
            raise EngineError("the trace of a sequence is of other tokens than the sequence", found=self.trace)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> np.ndarray:
        """(T,) bool: tokens that the model sampled, which are those to train on."""
        return self.versions != NOT_SAMPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Log-probs of one sequence under the trainer's weights, to prove that an engine computes with the same weights.

    token_ids    (T,)
    logprobs     (T - 1,) of every token but the first, at temperature 1
    tolerance    on the median difference: 1e-3 is generous for float32, 0.05 for bfloat16
    """

    token_ids: Sequence[int]
    logprobs: np.ndarray
    tolerance: float = 0.05

    def check(self, found: np.ndarray, engine: str) -> None:
        """Raise unless the engine's log-probs (T - 1,) are the trainer's.

        The median, because a few tokens go to other experts and differ by much; with wrong weights most tokens do.
        """
        difference = np.abs(np.asarray(found, np.float64) - self.logprobs)
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
