"""What every rollout engine offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from moe_replay.errors import EngineError, EngineName
from moe_replay.rollout.types import Probe, Sample, SamplingParams, Weights
from moe_replay.routes.topology import MoeTopology


class Engine(Protocol):
    """A rollout engine: sample with routes, follow the trainer's weights, make room when it does not run."""

    @property
    def name(self) -> EngineName:
        """Which engine, in which version."""
        ...

    @property
    def topology(self) -> MoeTopology:
        """Which layers of the model route."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights now sampled from."""
        ...

    def healthy(self) -> bool:
        """Whether it is there and alive, ready to sample or not."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Sample]]:
        """`params.n` samples for each prompt, in the order of the prompts."""
        ...

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """The samples of one prompt, while others are under way."""
        ...

    def prompt_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T - 1,) float32: log-probs of every token but the first, at temperature 1."""
        ...

    def update_weights(self, weights: Weights, version: int, probe: Probe | None = None) -> None:
        """Replace all weights in place, forget cached prefixes, and stamp later samples with `version`.

        What is being sampled is aborted first, so that no sample mixes two versions in silence. An update that fails,
        or whose result contradicts `probe`, leaves an engine that refuses to sample until an update succeeds.
        """
        ...

    def sleep(self) -> None:
        """Free the memory that sampling needs, while the trainer works on the same device."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def abort(self) -> None:
        """End what is being sampled; unfinished samples come back with `FinishReason.ABORT`."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def end_tokens(*configs: Any) -> tuple[int, ...]:
    """The end-of-sequence tokens that the first of these configs names."""
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)
    return ()


def check_prompts(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Raise at the first prompt that leaves nothing to sample."""
    for sample, prompt in enumerate(prompts):
        if not 0 < len(prompt) < max_length:
            raise EngineError(
                "a prompt that cannot be continued",
                sample=sample,
                expected=f"1 to {max_length - 1} tokens",
                found=f"{len(prompt)} tokens",
                remedy="Truncate or drop prompts that are as long as the longest sequence of the engine",
            )
