"""Checks of every step: the alignment of the rollout's routes, and the log-probs of the first update."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from moe_replay.errors import ReplayStateError
from moe_replay.records import MicroBatch
from moe_replay.train.backends.base import Backend, Routing
from moe_replay.train.config.sections import Dtype
from moe_replay.verification.watch import AlignmentCheck

# ---- alignment of routes and tokens ----------------------------------------------------------------------------------


class Alignment:
    """Samples one micro-batch of each rank in every step, and judges the samples of all ranks together."""

    def __init__(self, backend: Backend) -> None:
        self._check = AlignmentCheck(backend.topology, backend.device)

    def choose(self, batches: Sequence[MicroBatch], step: int) -> MicroBatch | None:
        """Return the micro-batch to look at, chosen at random from those of this rank that are no dummies."""
        candidates = [batch for batch in batches if not batch.is_dummy]
        chance = np.random.default_rng([self._check.watch.seed, step, 1])
        return candidates[int(chance.integers(len(candidates)))] if candidates else None

    def look_at(self, batch: MicroBatch, step: int) -> None:
        """Sample what the trainer's routers choose and what the rollout recorded, for the rows of a micro-batch."""
        sampled = np.concatenate([trajectory.sampled for trajectory in batch.trajectories])
        for chunk, recorded in batch.rollout_routes.items():
            layout = batch.layout.unshared
            rollout = recorded.unshared(batch.layout) if recorded.num_rows < layout.num_rows else recorded
            self._check.add(batch.native_routes[chunk], rollout, layout, step, sampled)

    def check(self) -> dict[str, float]:
        """Return the metrics of the step; raise on every rank if routes are not aligned. All ranks call it."""
        verdict = self._check.check()
        return {"routing/aligned": verdict.metric, "routing/misalignment_evidence": round(self._check.evidence, 2)}


# ---- log-probs of the first update -----------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

NOISE_MARGIN = 8.0
"""Differences of up to this many times the largest one between two identical passes are noise."""

NOISE_CEILING = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.3}
"""The largest difference between two identical passes that the order of additions explains, by compute dtype.

On an H200, Megatron-Core's atomics came to 1e-6 in float32 and to 0.11 in bfloat16. Above these limits something else
is random, or noise decides which ratios are clipped.
"""


class FirstUpdateCheck:
    """Compares the log-probs of the first update of each step with the old ones.

    Weights and replayed routes are the same, so the difference is exactly 0 where kernels are deterministic. Where they
    are not (adding up experts by atomics on a GPU), it is held to the noise floor of the stack: the largest difference
    between two passes over the same batch that replay the same routes. A noise floor above `NOISE_CEILING` is an error.

    tolerance   "auto", or the largest difference that is accepted
    dtype       that the trainer computes in
    """

    def __init__(self, tolerance: float | Literal["auto"], dtype: Dtype) -> None:
        self._tolerance = tolerance
        self._dtype = dtype
        self.noise = 0.0

    @property
    def limit(self) -> float:
        """Largest difference that is accepted at present."""
        return NOISE_MARGIN * self.noise if self._tolerance == "auto" else self._tolerance

    def check(self, largest: float, backend: Backend, batches: Sequence[MicroBatch], routing: Routing) -> None:
        """Raise if the log-probs of the update are further apart than the stack explains. All ranks call it.

        largest   over all ranks
        batches   micro-batches of the update on this rank, and how they are routed in it
        """
        if not largest <= self.limit and self._tolerance == "auto" and batches:
            self._measure(backend, batches, routing)
        if not largest <= self.limit:
            exact = f"within {NOISE_MARGIN:g} times the noise floor of {self.noise:.3g}" if self.noise else "exactly 1"
            raise ReplayStateError(
                "the first update of the step computes other log-probs than the old-log-prob pass, although weights "
                "and replayed routes are the same",
                expected=f"a ratio of {exact} (log-probs within {self.limit:.3g})",
                found=f"log-probs up to {largest:.3g} apart",
                remedy="Something in the model is random or depends on the pass (dropout, jitter, kernels that behave "
                "differently with gradients); if that is intended, set replay.first_ratio_tolerance",
            )

    def _measure(self, backend: Backend, batches: Sequence[MicroBatch], routing: Routing) -> None:
        """Raise the noise floor to the largest difference of two identical passes on all ranks.

        Where layers are compiled, a third one without compiled code counts too: passes with and without gradients are
        compiled separately and round as differently.
        """
        scored = backend.score(batches, routing)
        others = [backend.score(batches, routing)]
        if backend.is_compiled:
            others.append(backend.score_uncompiled(batches, routing))
        largest = torch.zeros((), device=backend.device)
        for batch, before, *again in zip(batches, scored, *others, strict=True):
            for after in again:
                if before is not None and after is not None and not batch.is_dummy and before.logprobs.numel():
                    largest = torch.maximum(largest, (before.logprobs - after.logprobs).abs().max().float())
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if float(largest) > NOISE_CEILING[self._dtype]:
            raise ReplayStateError(
                "two identical passes of the trainer, with the same weights and replayed routes, are too far apart for "
                "the first update of a step to be checked",
                expected=f"log-probs at most {NOISE_CEILING[self._dtype]:g} apart in {self._dtype}",
                found=f"log-probs up to {float(largest):.3g} apart",
                remedy="Set replay.deterministic = true, which makes sums over experts exact. If they stay apart, the "
                "model itself is random (dropout, jitter): find out where. replay.first_ratio_tolerance sets "
                "another limit",
            )
        previous, self.noise = self.noise, max(self.noise, float(largest))
        if self.noise > previous:
            exact = " and model.compile = false make" if backend.is_compiled else " makes"
            logger.warning(
                "two identical passes give log-probs up to %.3g apart: kernels on this device are not deterministic%s. "
                "The first update of each step is held to %g times that; replay.deterministic = true%s it exact",
                self.noise,
                ", or layers round differently when they are compiled" if backend.is_compiled else "",
                NOISE_MARGIN,
                exact,
            )
