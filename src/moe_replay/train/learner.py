"""What is done with the samples of a step: old log-probs, reference, and the updates of the policy.

pass                off         r2          r3
old log-probs       native      recorded    replays the rollout's routes
every update        native      replays     replays the rollout's routes
reference           native      native      native
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from moe_replay.errors import ReplayStateError
from moe_replay.train.alignment import Alignment
from moe_replay.train.backends.base import Backend, LossFunction, Routing, Scores
from moe_replay.train.batches import mini_batches
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.losses import policy_loss
from moe_replay.train.meters import Meters
from moe_replay.train.micro_batch import MicroBatch
from moe_replay.train.replay_mode import resolve
from moe_replay.train.schedule import learning_rate
from moe_replay.train.trajectory import Trajectory

FIRST_UPDATE = "first_update"

Progress = Callable[[int, int], None]
"""(updates done, updates wanted)"""


class Learner:
    """The policy, and how it learns."""

    def __init__(self, config: TrainConfig, backend: Backend) -> None:
        self.backend = backend
        self.plan = resolve(config)
        self.skipped_in_a_row = 0
        self._config = config

    def prepare(self, trajectories: Sequence[Trajectory]) -> list[list[MicroBatch]]:
        """This rank's micro-batches of each update. They stay the same in all passes of the step."""
        config = self._config
        return mini_batches(
            trajectories,
            self.backend,
            updates=config.algorithm.updates_per_rollout,
            aggregation=config.algorithm.loss,
            max_tokens=config.rollout.max_tokens,
            budget=config.batch.tokens_per_micro_batch,
            packed=config.batch.packed,
            overlong_filter=config.algorithm.overlong_filter,
        )

    # ---- before the updates -------------------------------------------------------------------------------------

    def score(
        self, updates: Sequence[Sequence[MicroBatch]], meters: Meters, step: int, *, compare: bool = False
    ) -> None:
        """Old log-probs, and those of the reference; `compare` also scores without replay."""
        batches = [batch for batches in updates for batch in batches]
        if self.plan.mode == "r3":
            for batch in batches:
                batch.routes = batch.rollout_routes(self.backend.chunk_layers)
        for batch, scores in zip(batches, self.backend.score(batches, self.plan.scoring), strict=True):
            self._take_old(batch, scores, meters)
        if self.plan.observe:
            self._compare_routes(batches, meters, step)
        if self.plan.mode == "off":
            for batch in batches:
                batch.routes = {}
        if compare:
            self._score_natively(batches, meters)
        if self._config.algorithm.beta:
            for batch, reference in zip(batches, self.backend.score_reference(batches), strict=True):
                batch.reference = reference

    def _take_old(self, batch: MicroBatch, scores: Scores | None, meters: Meters) -> None:
        if scores is None:  # this rank's part of the model does not end in log-probs
            return
        batch.old = scores.logprobs
        if not batch.filler:
            meters.mismatch("rollout_vs_old", batch.rollout, scores.logprobs)
            meters.mean("loss/entropy", scores.entropy)

    def _compare_routes(self, batches: Sequence[MicroBatch], meters: Meters, step: int) -> None:
        """The trainer's own choice under the old weights against the rollout's: measured in every mode."""
        alignment = Alignment(self.backend, step)
        for batch in batches:
            if batch.filler:
                continue
            replayed = self.plan.mode == "r3"
            rollout = batch.routes if replayed else batch.rollout_routes(self.backend.chunk_layers)
            native = batch.native if replayed else batch.routes
            for chunk, routes in rollout.items():
                meters.agreement(routes, native[chunk])
            alignment.look_at(native, rollout, batch.layout)
            meters.routes(batch.routes.values(), batch.layout, replayed=self.plan.mode != "off")
        meters.same("routing/aligned", alignment.checked())

    def _score_natively(self, batches: Sequence[MicroBatch], meters: Meters) -> None:
        for batch, scores in zip(batches, self.backend.score(batches, Routing("native")), strict=True):
            if scores is not None and not batch.filler:
                meters.mismatch("rollout_vs_native", batch.rollout, scores.logprobs)

    # ---- updates ------------------------------------------------------------------------------------------------

    def update(
        self, updates: Sequence[Sequence[MicroBatch]], meters: Meters, step: int, progress: Progress | None = None
    ) -> dict[str, float]:
        """One optimizer step on each of the mini-batches. What it found that is the same on all ranks."""
        lr = learning_rate(self._config.optim, step, self._config.steps)
        norms, skipped = [], 0
        for number, batches in enumerate(updates):
            if not batches:  # nothing in it is to be trained on
                continue
            loss = self._loss(meters, 1 / len(updates), first=number == 0)
            done = self.backend.update(batches, loss, self.plan.updating, lr)
            norms.append(done.grad_norm)
            skipped += not done.applied
            self.skipped_in_a_row = 0 if done.applied else self.skipped_in_a_row + 1
            if progress is not None:
                progress(number + 1, len(updates))
            if self.skipped_in_a_row > self._config.optim.max_bad_steps:
                break
        norm = sum(norms) / len(norms) if norms else 0.0
        return {"loss/grad_norm": norm, "loss/lr": lr, "loss/skipped": float(skipped)}

    @property
    def has_diverged(self) -> bool:
        """Whether too many updates in a row had gradients that are not finite."""
        return self.skipped_in_a_row > self._config.optim.max_bad_steps

    def _loss(self, meters: Meters, share: float, *, first: bool) -> LossFunction:
        """The loss of a micro-batch; what it sees on the way is counted, as a share of the step's updates."""
        algorithm = self._config.algorithm

        def loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
            assert batch.old is not None
            found = policy_loss(
                logprobs,
                batch.old,
                batch.advantages,
                batch.weights,
                batch.sequence,
                batch.num_sequences,
                rollout=batch.rollout,
                reference=batch.reference,
                level=algorithm.level,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                beta=algorithm.beta,
                correction=self.plan.correction,
                correction_low=algorithm.correction_low,
                correction_high=algorithm.correction_high,
            )
            if not batch.filler:
                meters.sum("loss/total", found.loss * share)
                meters.mean("loss/clip_low", found.clipped_low)
                meters.mean("loss/clip_high", found.clipped_high)
                meters.mean("loss/correction", found.correction)
                if found.reference_kl is not None:
                    meters.mean("loss/reference_kl", found.reference_kl)
                meters.mismatch("rollout_vs_train", batch.rollout, logprobs)
                meters.mismatch("old_vs_train", batch.old, logprobs)
                if first:
                    meters.mismatch(FIRST_UPDATE, batch.old, logprobs)
            return found.loss

        return loss

    def checked(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the step, if they show that all went right; what only the check needs is left out.

        In a step's first update weights and replayed routes are those of the old-log-prob pass, so the ratio is 1.
        """
        largest = metrics.get(f"mismatch/{FIRST_UPDATE}/logprob_abs_diff/max", 0.0)
        tolerance = self._config.replay.first_ratio_tolerance
        if self.plan.mode != "off" and not largest <= tolerance:
            raise ReplayStateError(
                "the first update of the step does not see the log-probs of the old-log-prob pass, although its "
                "weights and its replayed routes are the same",
                expected=f"a ratio of exactly 1 (log-probs within {tolerance})",
                found=f"log-probs up to {largest:.3g} apart",
                remedy="Something in the model is random or depends on the pass (dropout, jitter, kernels that are not "
                "deterministic); for the last, raise replay.first_ratio_tolerance",
            )
        return {name: value for name, value in metrics.items() if not name.startswith(f"mismatch/{FIRST_UPDATE}/")}
