"""`Episode`: one sequence while it is sampled, turn by turn; what environments work on (see `environments.py`).

Observed tokens are fed to the model, routed by the engine in the next turn, and never trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.rollout.engine import Sampler
from moe_replay.rollout.session import Session
from moe_replay.rollout.types import FinishReason, Sample, SamplingParams
from moe_replay.train.data import Prompt
from moe_replay.train.tools import ToolSet


class EpisodeError(MoeReplayError):
    """An environment that raised, took too long, or asked for more turns than are allowed."""

    exit_status = ExitStatus.FAILED


@dataclass(slots=True, kw_only=True)
class Episode:
    """One sample of a prompt, turn by turn.

    params       sampling parameters of each turn, n = 1
    max_length   maximum number of tokens in the sequence
    max_turns    maximum number of completions, the first included
    turns        turns started so far
    tools        functions of rollout.tools; None if there are none
    """

    prompt: Prompt
    session: Session
    engine: Sampler
    params: SamplingParams
    tokenizer: Any
    max_length: int
    max_turns: int = 1
    turns: int = 1
    tools: ToolSet | None = None

    def __str__(self) -> str:
        return f"turn {self.turns}, {len(self.session)} tokens"

    async def start(self, sample: Sample) -> FinishReason:
        """Add the first turn; if a weight update aborted it, sample the rest of it."""
        self.session.absorb(sample)
        return await self._finish_turn()

    @property
    def completion(self) -> str:
        """Text of the last turn, without special tokens."""
        return self.tokenizer.decode(self.session.token_ids[self.session.turn_starts_at :], skip_special_tokens=True)

    @property
    def raw_completion(self) -> str:
        """Text of the last turn, special tokens included."""
        return self.tokenizer.decode(self.session.token_ids[self.session.turn_starts_at :], skip_special_tokens=False)

    @property
    def can_continue(self) -> bool:
        """Whether `max_turns` and `max_length` allow another turn; `observe` always leaves room for one token."""
        return self.turns < self.max_turns and len(self.session) < self.max_length

    def observe(self, text: str) -> None:
        """Append text that the model did not generate: a tool's output or the next user message, template included."""
        self.session.observe(self._ids(text)[: max(0, self.max_length - 1 - len(self.session))])

    def fits(self, text: str) -> bool:
        """Whether `observe` would not have to truncate the text."""
        return len(self.session) + len(self._ids(text)) < self.max_length

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    async def generate(self) -> FinishReason:
        """Sample another turn."""
        if not self.can_continue:
            raise EpisodeError(
                "no further turn is allowed",
                sample=f"row {self.prompt.row}",
                expected=f"at most {self.max_turns} turns and {self.max_length} tokens",
                found=f"{self.turns} turns and {len(self.session)} tokens so far",
                remedy="Check episode.can_continue before episode.generate()",
            )
        self.turns += 1
        await self.session.generate(self.engine, self.params)
        return await self._finish_turn()

    async def _finish_turn(self) -> FinishReason:
        reason = self.session.finish_reason
        while reason is FinishReason.ABORT:  # a weight update: the new weights sample the rest of the turn
            reason = await self.session.generate(self.engine, self.params)
        assert reason is not None
        return reason
