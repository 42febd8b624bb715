"""Made-up trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

import moe_replay as mr
from moe_replay.records import FinishReason, RolloutBatch, Trajectory
from moe_replay.sampling_mask import SamplingMask
from moe_replay.train.trajectories.store import InProcessStore

LAYERS = (1, 2, 3)
NUM_EXPERTS, TOP_K = 8, 2


class MadeUp(Trajectory):
    """A trajectory that tests may change."""

    def ended_by_length(self) -> Trajectory:
        return dataclasses.replace(self, finish_reason=FinishReason.LENGTH)


def random_trajectory(row: int, prompt: int, completion: int, observed: int = 0, version: int = 0) -> MadeUp:
    """`prompt` tokens, `completion` sampled ones, with `observed` tokens of a tool in the middle of them."""
    random = np.random.default_rng(row)
    tokens = prompt + completion + observed
    sampled = np.ones(tokens, bool)
    sampled[:prompt] = False
    sampled[prompt + completion // 2 : prompt + completion // 2 + observed] = False
    ids = random.integers(1, 90, tokens).astype(np.int32)
    experts = np.argsort(random.random((tokens, len(LAYERS), NUM_EXPERTS)), axis=-1)[..., :TOP_K].astype(np.uint8)
    covered = np.arange(tokens) < tokens - 1
    return MadeUp(
        row=row,
        group=row // 2,
        token_ids=ids,
        logprobs=np.where(sampled, -random.random(tokens), 0).astype(np.float32),
        versions=np.where(sampled, version, -1).astype(np.int64),
        trace=mr.RouteTrace(ids, experts, LAYERS, covered, version, num_experts=NUM_EXPERTS),
        finish_reason=FinishReason.STOP,
        reward=float(random.random()),
        advantage=float(random.normal()),
    )


def random_mask(sequence: Trajectory, vocab_size: int, seed: int = 0) -> SamplingMask:
    """Supports of a third of the vocabulary, or all of it, that hold the sampled tokens."""
    random = np.random.default_rng(seed)
    kept = random.random((len(sequence), vocab_size)) < 1 / 3
    kept[np.arange(len(sequence)), sequence.token_ids] = True
    kept[~sequence.sampled | (random.random(len(sequence)) < 0.2)] = True
    return SamplingMask(vocab_size, kept.sum(1), np.nonzero(kept)[1])


def stored(trajectories: Sequence[Trajectory]) -> tuple[RolloutBatch, InProcessStore]:
    """A batch of trajectories of this process, and the store that has them."""
    store = InProcessStore()
    return store.put(trajectories), store
