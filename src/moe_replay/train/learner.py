"""`Learner`: old log-probs, reference log-probs, and policy updates on the samples of a step.

pass                off         r2                          r3
old log-probs       native      native, routes recorded     replays rollout routes
updates             native      replays recorded routes     replays rollout routes
reference           native      native                      native
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_replay.errors import ReplayStateError
from moe_replay.train.alignment import Alignment
from moe_replay.train.backends.base import Backend, LossFunction, Routing, Scores
from moe_replay.train.batches import mini_batches
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.losses import policy_loss
from moe_replay.train.meters import Meters
from moe_replay.train.micro_batch import MicroBatch
from moe_replay.train.replay_mode import plan_replay
from moe_replay.train.schedule import learning_rate
from moe_replay.train.types import Trajectory
from moe_replay.utils.progress import ProgressCallback


class Learner:
    """Scores and updates the policy of a backend as the config says."""

    def __init__(self, config: TrainConfig, backend: Backend) -> None:
        self.backend = backend
        self.plan = plan_replay(config)
        self.skipped_in_a_row = 0
        self._config = config

    def prepare(self, trajectories: Sequence[Trajectory]) -> list[list[MicroBatch]]:
        """Return the micro-batches of this rank for each update; all passes of the step use the same ones."""
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
        """Add old and reference log-probs to the micro-batches; `compare` also scores without replay."""
        batches = [batch for batches in updates for batch in batches]
        if self.plan.mode == "r3":
            for batch in batches:
                batch.add_rollout_routes(self.backend.chunk_layers)
        for batch, scores in zip(batches, self.backend.score(batches, self.plan.scoring), strict=True):
            self._add_old_logprobs(batch, scores, meters)
        if self.plan.observe:
            self._compare_routes(batches, meters, step)
        if compare:
            self._score_natively(batches, meters)
        if self._config.algorithm.beta:
            for batch, reference in zip(batches, self.backend.score_reference(batches), strict=True):
                batch.ref_logprobs = reference

    def _add_old_logprobs(self, batch: MicroBatch, scores: Scores | None, meters: Meters) -> None:
        if scores is None:  # not on the last pipeline stage
            return
        batch.old_logprobs = scores.logprobs
        if not batch.is_dummy:
            meters.mismatch("rollout_vs_old", batch.rollout_logprobs, scores.logprobs)
            meters.mean("loss/entropy", scores.entropy)

    def _compare_routes(self, batches: Sequence[MicroBatch], meters: Meters, step: int) -> None:
        """Compare the trainer's own choice under the old weights with the rollout's routes, in every mode."""
        alignment = Alignment(self.backend, step)
        for batch in batches:
            if batch.is_dummy:
                continue
            if self.plan.mode != "r3":
                batch.add_rollout_routes(self.backend.chunk_layers)
            for chunk, routes in batch.rollout_routes.items():
                meters.agreement(routes, batch.native_routes[chunk])
            alignment.look_at(batch.native_routes, batch.rollout_routes, batch.layout)
            used = batch.rollout_routes if self.plan.mode == "r3" else batch.native_routes
            meters.routes(used.values(), batch.layout, replayed=self.plan.mode != "off")
            batch.native_routes = {}
            if self.plan.mode != "r3":
                batch.rollout_routes = {}
        meters.same("routing/aligned", alignment.checked())

    def _score_natively(self, batches: Sequence[MicroBatch], meters: Meters) -> None:
        for batch, scores in zip(batches, self.backend.score(batches, Routing("native")), strict=True):
            if scores is not None and not batch.is_dummy:
                meters.mismatch("rollout_vs_native", batch.rollout_logprobs, scores.logprobs)

    # ---- updates ------------------------------------------------------------------------------------------------

    def update(
        self,
        updates: Sequence[Sequence[MicroBatch]],
        meters: Meters,
        step: int,
        progress: ProgressCallback | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on each mini-batch; return the metrics that are the same on all ranks."""
        lr = learning_rate(self._config.optim, step, self._config.steps)
        norms, skipped = [], 0
        for number, batches in enumerate(updates):
            if not batches:  # no sequence of it is trained on
                continue
            loss = self._loss(meters, 1 / len(updates), first=not norms)
            result = self.backend.update(batches, loss, self.plan.updating, lr)
            norms.append(result.grad_norm)
            skipped += not result.applied
            self.skipped_in_a_row = 0 if result.applied else self.skipped_in_a_row + 1
            if progress is not None:
                progress(number + 1, len(updates))
            if self.skipped_in_a_row > self._config.optim.max_bad_steps:
                break
        norm = sum(norms) / len(norms) if norms else 0.0
        return {"loss/grad_norm": norm, "loss/lr": lr, "loss/skipped": float(skipped)}

    @property
    def has_diverged(self) -> bool:
        """Whether too many updates in a row had a gradient that is not finite."""
        return self.skipped_in_a_row > self._config.optim.max_bad_steps

    def _loss(self, meters: Meters, share: float, *, first: bool) -> LossFunction:
        """Return the loss of a micro-batch of one update, `share` of the step's updates; it adds to the metrics."""
        algorithm = self._config.algorithm

        def loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
            assert batch.old_logprobs is not None
            found = policy_loss(
                logprobs,
                batch.old_logprobs,
                batch.advantages,
                batch.loss_weights,
                batch.sequence,
                batch.num_sequences,
                rollout=batch.rollout_logprobs,
                reference=batch.ref_logprobs,
                level=algorithm.level,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                beta=algorithm.beta,
                correction=self.plan.correction,
                correction_low=algorithm.correction_low,
                correction_high=algorithm.correction_high,
            )
            if not batch.is_dummy:
                meters.sum("loss/total", found.loss * share)
                meters.mean("loss/clip_low", found.clipped_low)
                meters.mean("loss/clip_high", found.clipped_high)
                meters.mean("loss/correction", found.correction)
                if found.reference_kl is not None:
                    meters.mean("loss/reference_kl", found.reference_kl)
                meters.mismatch("rollout_vs_train", batch.rollout_logprobs, logprobs)
                meters.mismatch("old_vs_train", batch.old_logprobs, logprobs)
                if first:
                    meters.first_update(batch.old_logprobs, logprobs)
            return found.loss

        return loss

    # ---- the end of the step ------------------------------------------------------------------------------------

    def summarize(self, meters: Meters) -> dict[str, float]:
        """Return the metrics of the step over all ranks; raise where the first update shows that replay failed."""
        summary = meters.combined(reports=self.backend.reports_metrics)
        self.check_first_update(summary.first_update_diff)
        return summary.metrics

    def check_first_update(self, largest: float) -> None:
        """Raise unless log-probs of old-log-prob pass and first update are within the tolerance of each other.

        In the first update of a step weights and replayed routes are those of the old-log-prob pass: the ratio is 1.
        """
        tolerance = self._config.replay.first_ratio_tolerance
        if self.plan.mode != "off" and not largest <= tolerance:
            raise ReplayStateError(
                "the first update of the step computes other log-probs than the old-log-prob pass, although weights "
                "and replayed routes are the same",
                expected=f"a ratio of exactly 1 (log-probs within {tolerance})",
                found=f"log-probs up to {largest:.3g} apart",
                remedy="Something in the model is random or depends on the pass (dropout, jitter, kernels that are not "
                "deterministic); for the last, raise replay.first_ratio_tolerance",
            )
