"""`Learner`: old log-probs, reference log-probs, and policy updates on the samples of a step.

pass                off         r2                          r3
old log-probs       native      native, routes recorded     replays rollout routes
updates             native      replays recorded routes     replays rollout routes
reference           native      native                      native
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from moe_replay.diagnostics.accumulator import MetricAccumulator
from moe_replay.routes.batch import RouteBatch
from moe_replay.train.alignment import Alignment
from moe_replay.train.backends.base import Backend, LossFunction, RouteObserver, Routing, Scores
from moe_replay.train.batches import mini_batches
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.first_update import FirstUpdateCheck
from moe_replay.train.losses.registry import LossError, load_loss, metric_names
from moe_replay.train.losses.types import LossInputs, LossOutput, LossSettings
from moe_replay.train.micro_batch import MicroBatch
from moe_replay.train.replay_mode import plan_replay
from moe_replay.train.schedule import learning_rate
from moe_replay.train.trajectories.shared_batch import SharedBatch
from moe_replay.utils.progress import ProgressCallback

PAIRS = ("rollout_vs_old", "rollout_vs_native", "rollout_vs_train", "old_vs_train")
FIRST_UPDATE = "largest log-prob difference of the first update"


class Learner:
    """Scores and updates the policy of a backend as the config says."""

    def __init__(self, config: TrainConfig, backend: Backend) -> None:
        self.backend = backend
        self.plan = plan_replay(config)
        self.skipped_in_a_row = 0
        self._config = config
        self._first_update = FirstUpdateCheck(config.replay.first_ratio_tolerance, config.model.dtype)
        self._policy_loss = load_loss(config.algorithm.policy_loss)
        self._loss_settings = LossSettings(
            level=config.algorithm.level,
            clip_low=config.algorithm.clip_low,
            clip_high=config.algorithm.clip_high,
            beta=config.algorithm.beta,
            correction=self.plan.correction,
            correction_low=config.algorithm.correction_low,
            correction_high=config.algorithm.correction_high,
        )

    @cached_property
    def _loss_metrics(self) -> tuple[str, ...]:
        """Names of the token metrics of the loss, the same on every rank."""
        return metric_names(self._policy_loss, self._loss_settings, self.backend.device)

    @cached_property
    def _alignment(self) -> Alignment:
        """The alignment tests, whose evidence accumulates over steps."""
        return Alignment(self.backend)

    def new_metrics(self) -> MetricAccumulator:
        """Return an empty accumulator of the metrics of one step, with the same layout on every rank."""
        return MetricAccumulator(
            self.backend.topology,
            self.backend.device,
            means=["loss/entropy", *(f"loss/{name}" for name in self._loss_metrics)],
            totals=["loss/total"],
            pairs=PAIRS,
            maxima=[FIRST_UPDATE],
        )

    def prepare(self, batch: SharedBatch) -> list[list[MicroBatch]]:
        """Return the micro-batches of this rank for each update; all passes of the step use the same ones."""
        config = self._config
        return mini_batches(
            batch,
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
        self, updates: Sequence[Sequence[MicroBatch]], metrics: MetricAccumulator, step: int, *, compare: bool = False
    ) -> dict[str, float]:
        """Add old and reference log-probs to the micro-batches; return the metrics that are the same on all ranks.

        compare   also score without replay, for mismatch/rollout_vs_native
        """
        batches = [batch for batches in updates for batch in batches]
        watched = self._alignment.choose(batches, step) if self.plan.observe else None
        scoring = replace(self.plan.scoring, observer=self._observer(metrics, watched))
        for batch, scores in zip(batches, self.backend.score(batches, scoring), strict=True):
            self._add_old_logprobs(batch, scores, metrics)
        found = self._check_alignment(watched, step) if self.plan.observe else {}
        if compare:
            self._score_natively(batches, metrics)
        if self._config.algorithm.beta:
            for batch, reference in zip(batches, self.backend.score_reference(batches), strict=True):
                batch.ref_logprobs = reference
        return found

    def _add_old_logprobs(self, batch: MicroBatch, scores: Scores | None, metrics: MetricAccumulator) -> None:
        if scores is None:  # not on the last pipeline stage
            return
        batch.old_logprobs = scores.logprobs
        if not batch.is_dummy:
            metrics.add_logprobs("rollout_vs_old", batch.rollout_logprobs, scores.logprobs)
            metrics.add_mean("loss/entropy", scores.entropy)

    def _observer(self, metrics: MetricAccumulator, watched: MicroBatch | None) -> RouteObserver:
        """Return what compares the trainer's own choice under the old weights with the rollout's routes, in every mode.

        It is called for each chunk of each micro-batch; only the routes of `watched` are kept.
        """
        mode = self.plan.mode

        def compare(batch: MicroBatch, chunk: int, native: RouteBatch, replayed: RouteBatch | None) -> None:
            if batch.is_dummy:
                return
            rollout = batch.lay_out_routes(chunk) if replayed is None else replayed
            metrics.add_agreement(rollout, native)
            used = rollout if mode == "r3" else native
            metrics.add_load(used, batch.layout)
            if mode != "off":
                metrics.add_coverage(used, batch.layout, replayed=True)
            if batch is watched:
                batch.native_routes[chunk], batch.rollout_routes[chunk] = native, rollout

        return compare

    def _check_alignment(self, watched: MicroBatch | None, step: int) -> dict[str, float]:
        if watched is not None:
            self._alignment.look_at(watched, step)
            watched.native_routes, watched.rollout_routes = {}, {}
        return self._alignment.check()

    def _score_natively(self, batches: Sequence[MicroBatch], metrics: MetricAccumulator) -> None:
        if self.plan.mode != "r3":  # the old log-probs are those of a native pass
            for batch in batches:
                if batch.old_logprobs is not None and not batch.is_dummy:
                    metrics.add_logprobs("rollout_vs_native", batch.rollout_logprobs, batch.old_logprobs)
            return
        for batch, scores in zip(batches, self.backend.score(batches, Routing("native")), strict=True):
            if scores is not None and not batch.is_dummy:
                metrics.add_logprobs("rollout_vs_native", batch.rollout_logprobs, scores.logprobs)

    # ---- updates ------------------------------------------------------------------------------------------------

    def update(
        self,
        updates: Sequence[Sequence[MicroBatch]],
        metrics: MetricAccumulator,
        step: int,
        progress: ProgressCallback | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on each mini-batch, in each of the passes over the samples.

        All passes have the same micro-batches, old log-probs and replayed routes. Returns the metrics that are the
        same on all ranks.
        """
        lr = learning_rate(self._config.optim, step, self._config.steps)
        norms, skipped = [], 0
        all_updates = [batches for _ in range(self._config.algorithm.num_iterations) for batches in updates]
        for number, batches in enumerate(all_updates):
            if not batches:  # no sequence of it is trained on
                continue
            loss = self._loss(metrics, 1 / len(all_updates), first=not norms)
            result = self.backend.update(batches, loss, self.plan.updating, lr)
            norms.append(result.grad_norm)
            skipped += not result.applied
            self.skipped_in_a_row = 0 if result.applied else self.skipped_in_a_row + 1
            if progress is not None:
                progress(number + 1, len(all_updates))
            if self.skipped_in_a_row > self._config.optim.max_bad_steps:
                break
        norm = sum(norms) / len(norms) if norms else 0.0
        return {"loss/grad_norm": norm, "loss/lr": lr, "loss/skipped": float(skipped)}

    @property
    def has_diverged(self) -> bool:
        """Whether too many consecutive updates had a gradient that is not finite."""
        return self.skipped_in_a_row > self._config.optim.max_bad_steps

    def _loss(self, metrics: MetricAccumulator, share: float, *, first: bool) -> LossFunction:
        """Return the loss of a micro-batch of one update, `share` of the step's updates; it adds to the metrics."""

        def loss(batch: MicroBatch, logprobs: Tensor) -> Tensor:
            assert batch.old_logprobs is not None
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=batch.old_logprobs,
                rollout_logprobs=batch.rollout_logprobs,
                ref_logprobs=batch.ref_logprobs,
                advantages=batch.advantages,
                weights=batch.loss_weights,
                sequence=batch.sequence,
                num_sequences=batch.num_sequences,
            )
            output = self._policy_loss(inputs, self._loss_settings)
            if not batch.is_dummy:
                self._add_loss_metrics(output, metrics, share)
                metrics.add_logprobs("rollout_vs_train", batch.rollout_logprobs, logprobs)
                metrics.add_logprobs("old_vs_train", batch.old_logprobs, logprobs)
                if first:
                    metrics.add_maximum(FIRST_UPDATE, (logprobs.detach() - batch.old_logprobs).abs())
            return output.loss

        return loss

    def _add_loss_metrics(self, output: LossOutput, metrics: MetricAccumulator, share: float) -> None:
        if output.token_metrics.keys() != set(self._loss_metrics):
            raise LossError(
                f"policy loss {self._config.algorithm.policy_loss!r} must return the same metrics each time",
                expected=", ".join(sorted(self._loss_metrics)) or "none",
                found=", ".join(sorted(output.token_metrics)) or "none",
            )
        metrics.add_total("loss/total", output.loss * share)
        for name, values in output.token_metrics.items():
            metrics.add_mean(f"loss/{name}", values)

    # ---- the end of the step ------------------------------------------------------------------------------------

    def summarize(self, metrics: MetricAccumulator, updates: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """Return the metrics of the step over all ranks; raise where the first update shows that replay failed."""
        reduced = metrics.reduce(report_tokens=self.backend.reports_metrics)
        self.check_first_update(reduced.maxima[FIRST_UPDATE], next(filter(None, updates), ()))
        return reduced.metrics

    def check_first_update(self, largest: float, batches: Sequence[MicroBatch] = ()) -> None:
        """Raise if old log-probs and those of the first update, in these micro-batches, are too far apart."""
        if self.plan.mode != "off":
            self._first_update.check(largest, self.backend, batches, self.plan.updating)
