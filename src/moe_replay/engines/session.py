"""`Session`: one sequence that grows turn by turn, across tool calls, aborts and weight updates.

    session = Session(prompt_ids)
    while await session.generate(engine, params) is FinishReason.ABORT:
        ...                                             # weights were updated: the next call resumes the turn
    session.observe(tool_output_ids)
    await session.generate(engine, params)
    sequence = session.finish()                         # trained on

Engines get token ids, never text, and the whole sequence in every turn. `keep` decides whether a routed token keeps its
route or takes that of a later turn; a token that no engine has routed is uncovered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from moe_replay.errors import EngineError
from moe_replay.records import NOT_SAMPLED, FinishReason, Sample, SamplingParams, Trajectory
from moe_replay.routes.trace import RouteTrace
from moe_replay.sampling_mask import SamplingMask


class TurnSampler(Protocol):
    """What a session needs of an engine."""

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]: ...


class Session:
    """The tokens of one sequence, T so far, and the origin of each.

    keep                as_sampled: a token keeps its first route; latest: it takes that of the last pass over it
    token_ids           (T,) int32
    logprobs            (T,) float32: of the sampled tokens, under the weights that sampled them; 0 elsewhere
    sampled_versions    (T,) int64: weight version that sampled the token, -1 for prompt and observations
    trace               routes of the tokens, with the weight version that routed each; None before the first turn
    sampling_mask       of the tokens; None if no turn has one
    servers             (first token, URL) of each part that one server has sampled
    """

    def __init__(self, prompt_ids: Sequence[int], keep: Literal["as_sampled", "latest"] = "as_sampled") -> None:
        self.keep: Literal["as_sampled", "latest"] = keep
        self.token_ids = np.zeros(0, np.int32)
        self.logprobs = np.zeros(0, np.float32)
        self.sampled_versions = np.zeros(0, np.int64)
        self.trace: RouteTrace | None = None
        self.sampling_mask: SamplingMask | None = None
        self.servers: tuple[tuple[int, str], ...] = ()
        self.finish_reason: FinishReason | None = None  # of the last turn
        self.turn_starts_at = 0
        self.observe(prompt_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> np.ndarray:
        """(T,) bool: tokens that the model sampled, which are those to train on."""
        return self.sampled_versions != NOT_SAMPLED

    # ---- growing ------------------------------------------------------------------------------------------------

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample: a prompt, a tool's output."""
        if self.finish_reason is FinishReason.ABORT:
            raise EngineError(
                "an observation in the middle of a turn",
                token=len(self),
                remedy="The turn was aborted: call generate again to resume it, then append the observation",
            )
        ids = np.asarray(token_ids, np.int32)
        self._append(ids, np.zeros(len(ids), np.float32), NOT_SAMPLED)
        if self.sampling_mask is not None:
            observed = SamplingMask.whole(len(ids), self.sampling_mask.vocab_size)
            self.sampling_mask = SamplingMask.concatenate([self.sampling_mask, observed])
        if self.trace is not None:
            self.trace = self.trace.append_tokens(ids)
        self.turn_starts_at = len(self)

    async def generate(self, engine: TurnSampler, params: SamplingParams) -> FinishReason:
        """Sample one turn, or after an abort the rest of the turn, with the engine's current weights."""
        remaining = self._remaining(params)
        (sample,) = await engine.generate_one(self.token_ids.tolist(), remaining)
        return self.absorb(sample)

    def absorb(self, sample: Sample) -> FinishReason:
        """Append the completion and the routes of a sample whose prompt is the sequence so far."""
        if not np.array_equal(sample.prompt_ids, self.token_ids):
            raise EngineError("a sample of another sequence", expected=f"{len(self)} tokens", found=sample.trace)
        if self.trace is None:
            self.trace = sample.trace
        else:
            self.trace = self.trace.continued_by(sample.trace, self.keep)
        if len(sample.completion_ids):  # a turn that was aborted before its first token has no mask
            self._absorb_mask(sample.sampling_mask)
        if sample.server and (not self.servers or self.servers[-1][1] != sample.server):
            self.servers += ((len(self), sample.server),)
        self._append(sample.completion_ids, sample.logprobs, sample.weight_version)
        self.finish_reason = sample.finish_reason
        return sample.finish_reason

    def finish(self) -> Trajectory:
        """Return the sequence so far as an immutable record."""
        if self.trace is None or self.finish_reason is None:
            raise EngineError(
                "a session that has not sampled anything cannot be finished",
                found=f"{len(self)} observed tokens",
                remedy="Call generate first",
            )
        return Trajectory(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.sampled_versions,
            trace=self.trace,
            finish_reason=self.finish_reason,
            sampling_mask=self.sampling_mask,
            servers=self.servers,
        )

    def _remaining(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters for the rest of an aborted turn, with a fresh seed."""
        sampled = len(self) - self.turn_starts_at if self.finish_reason is FinishReason.ABORT else 0
        if params.n != 1:
            raise EngineError("a session samples one sequence", expected="n=1", found=f"n={params.n}")
        if sampled >= params.max_tokens:
            raise EngineError(
                "the aborted turn has its maximum length already", expected=f"less than {params.max_tokens}"
            )
        if self.finish_reason is not FinishReason.ABORT:
            self.turn_starts_at = len(self)
        seed = None if params.seed is None else params.seed + len(self)
        return replace(params, max_tokens=params.max_tokens - sampled, seed=seed)

    def _absorb_mask(self, mask: SamplingMask | None) -> None:
        if (mask is None) != (self.sampling_mask is None) and self.sampled.any():
            raise EngineError(
                "some turns of a sequence have a sampling mask and others have none",
                token=len(self),
                remedy="Sample all turns with the same sampling_mask",
            )
        if mask is not None:
            earlier = self.sampling_mask or SamplingMask.whole(len(self), mask.vocab_size)
            self.sampling_mask = SamplingMask.concatenate([earlier, mask])

    def _append(self, ids: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        self.token_ids = np.concatenate([self.token_ids, ids])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        self.sampled_versions = np.concatenate([self.sampled_versions, np.full(len(ids), version, np.int64)])
