"""`Learner`: old log-probs, reference log-probs, and policy updates on the samples of a step.

pass                off         r2                          r3
old log-probs       native      native, routes recorded     replays rollout routes
updates             native      replays recorded routes     replays rollout routes
reference           native      native                      native

The first update of a step has the weights of the old-log-prob pass. Unless `algorithm.old_logprobs` is "always", its
forward is that pass for its own mini-batch, routed in the same way, and everything is measured there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_replay.distributed.ranks import rank
from moe_replay.records import MicroBatch, RolloutBatch
from moe_replay.routes.batch import RouteBatch
from moe_replay.train.backends.base import (
    Backend,
    LossFunction,
    OldPass,
    RouteObserver,
    Routing,
    Scores,
    captured_routes,
)
from moe_replay.train.config.sections import OptimConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.balance import ExpertBalance
from moe_replay.train.learn.batches import has_route, mini_batches, target_rows
from moe_replay.train.learn.losses import LossError, LossInputs, LossOutput, LossSettings, load_loss, metric_names
from moe_replay.train.learn.replay_mode import plan_replay
from moe_replay.train.learn.server_checks import ServerChecks
from moe_replay.train.learn.sharing import Sharing, num_differing
from moe_replay.train.learn.step_checks import Alignment, FirstUpdateCheck
from moe_replay.train.output.clock import Pass
from moe_replay.train.trajectories.store import TrajectoryStore
from moe_replay.utils.device import to_device
from moe_replay.utils.misc import ProgressCallback
from moe_replay.verification.metrics import MetricAccumulator

logger = logging.getLogger(__name__)

PAIRS = ("rollout_vs_old", "rollout_vs_native", "rollout_vs_train", "old_vs_train")
FIRST_UPDATE = "first_update_max_logprob_diff"
SHARED_TOKENS = "batch/shared_tokens"
DIFFERING_ROUTES = "batch/prompt_routes_differ"
PLANNED = "batch/planned"
DROPPED = "routing/dropped_tokens"
SHIFT_WEIGHT, SHIFT_FLOORED = "routing/shift_weight", "routing/shift_floored"
MEANS = ("loss/entropy", SHARED_TOKENS, DIFFERING_ROUTES, PLANNED, DROPPED, SHIFT_WEIGHT, SHIFT_FLOORED)


class _ExcludedServers(Exception):  # noqa: N818
    """Ends an update before its optimizer step: servers whose tokens are in it are not believed."""


@dataclass(frozen=True, slots=True)
class _Unscored:
    """The part of the old-log-prob pass of a step that is left to its updates.

    count     leading mini-batches whose first update takes the place of the pass
    compare   whether native log-probs are compared with those of the rollout
    watched   micro-batch whose routes are tested, among all of the step; None: each of these updates chooses its own
    """

    count: int = 0
    compare: bool = False
    watched: MicroBatch | None = None


class Learner:
    """Scores and updates the policy of a backend, as configured."""

    def __init__(self, config: TrainConfig, backend: Backend) -> None:
        self.backend = backend
        self.plan = plan_replay(config)
        self.skipped_in_a_row = 0
        self._config = config
        self.passes: dict[str, list[Pass]] = {"score": [], "train": []}
        self._passes = (0, 0)  # replayed and planned, up to the step before
        self._unscored = _Unscored()
        self._has_checked_forward = False
        self._first_update = FirstUpdateCheck(config.replay.first_ratio_tolerance, config.model.dtype)
        self._policy_loss = load_loss(config.algorithm.loss)
        settings = {field.name: getattr(config.algorithm, field.name) for field in fields(LossSettings)}
        self._loss_settings = LossSettings(**settings | {"rollout_correction": self.plan.correction})
        self._servers = ServerChecks(config, backend, needs_routes=self.plan.mode == "r3")

    @cached_property
    def _sharing(self) -> Sharing | None:
        """Rule for sharing prompts; None, and one line in the log, if prompts cannot be shared."""
        problem = self.backend.sharing_problem
        if self._config.batch.share_prompts is False:
            return None
        if problem is None:
            return Sharing(same_routes=self.plan.mode == "r3")
        if rank() == 0:
            logger.info("the prompt of a group is computed once for each sample: %s", problem)
        return None

    @cached_property
    def _balance(self) -> ExpertBalance | None:
        return ExpertBalance(self.backend) if self._config.batch.balance == "experts" else None

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
            means=[*MEANS, *(f"loss/{name}" for name in self._loss_metrics)],
            totals=["loss/total"],
            pairs=PAIRS,
            maxima=[FIRST_UPDATE],
        )

    def prepare(self, batch: RolloutBatch, store: TrajectoryStore) -> list[list[MicroBatch]]:
        config = self._config
        self._servers.begin(batch.servers)
        return mini_batches(
            batch,
            store,
            self.backend,
            updates=config.algorithm.updates_per_rollout,
            aggregation=config.algorithm.loss_aggregation,
            max_tokens=config.rollout.max_tokens,
            budget=config.batch.tokens_per_micro_batch,
            packed=config.batch.packed,
            overlong_filter=config.algorithm.overlong_filter,
            sharing=self._sharing,
            balance=self._balance,
        )

    # ---- before the updates -------------------------------------------------------------------------------------

    def score(
        self, updates: Sequence[Sequence[MicroBatch]], metrics: MetricAccumulator, step: int, *, compare: bool = False
    ) -> dict[str, float]:
        """Add old and reference log-probs to the micro-batches; return the metrics that are the same on all ranks.

        Micro-batches whose update provides their old log-probs get none here, and are measured there.

        compare   also score without replay, for mismatch/rollout_vs_native
        """
        self.passes = {"score": [], "train": []}
        self._servers.version = step - 1
        batches = [batch for batches in updates for batch in batches]
        unscored = self._unscored_updates(updates)
        if self.plan.drops:
            for batch in batches:
                self._drop_unrouted(batch, metrics)
        watched = self._alignment.choose(batches, step) if self.plan.observe else None
        each_chooses = self._config.algorithm.old_logprobs == "rollout"
        self._unscored = _Unscored(unscored, compare, None if each_chooses else watched)
        if scored := [batch for batches in updates[unscored:] for batch in batches]:
            scoring = self._counted(replace(self.plan.scoring, observer=self._observer(metrics, watched)), metrics)
            self._count("score", scored)
            for batch, scores in zip(scored, self.backend.score(scored, scoring), strict=True):
                if scores is not None:  # on the last pipeline stage
                    self._add_old_logprobs(batch, scores, metrics, compare=compare)
        for batch in batches:
            if not batch.is_dummy:
                self._servers.add_routes(batch)
                if self._sharing is not None:
                    self._add_sharing(batch, metrics)
        checked: dict[str, float] = {} if self._balance is None else dict(self._balance.metrics)
        if not unscored:
            checked |= self._servers.judge()
            checked |= self._check_alignment(watched, step) if self.plan.observe else {}
        if compare and self.plan.mode == "r3":
            self._score_natively(batches, metrics)
        if self._config.algorithm.beta:
            self._count("score", batches)
            for batch, reference in zip(batches, self.backend.score_reference(batches), strict=True):
                batch.ref_logprobs = reference
        return checked

    def _unscored_updates(self, updates: Sequence[Sequence[MicroBatch]]) -> int:
        """Return the number of leading mini-batches that their own updates score, the same on every rank."""
        trained = [number for number, batches in enumerate(updates, start=1) if batches]
        if not trained or self._config.algorithm.old_logprobs == "always":
            return 0
        return trained[-1] if self._config.algorithm.old_logprobs == "rollout" else trained[0]

    def _count(self, phase: str, batches: Sequence[MicroBatch]) -> None:
        """Note a pass over micro-batches, for the speed of the step."""
        self.passes[phase] += [
            Pass(
                tuple(map(len, batch.trajectories)),
                len(batch.sequence),
                tuple(prefix.length for prefix in batch.layout.prefixes),
            )
            for batch in batches
            if not batch.is_dummy
        ]

    def _add_sharing(self, batch: MicroBatch, metrics: MetricAccumulator) -> None:
        """Count the tokens that are not computed because they are shared, and samples whose routes prevent it."""
        layout, device = batch.layout, self.backend.device
        for name, part, whole in (
            (SHARED_TOKENS, layout.num_shared, layout.num_tokens),
            (DIFFERING_ROUTES, num_differing(batch), len(batch.trajectories)),
        ):
            metrics.add_mean(name, (torch.arange(whole, device=device) < part).double())

    def _add_old_logprobs(
        self, batch: MicroBatch, scores: Scores, metrics: MetricAccumulator, *, compare: bool
    ) -> None:
        from_rollout = self._config.algorithm.old_logprobs == "rollout"
        batch.old_logprobs = batch.rollout_logprobs if from_rollout else scores.logprobs
        if batch.is_dummy:
            return
        metrics.add_logprobs("rollout_vs_old", batch.rollout_logprobs, scores.logprobs)
        metrics.add_mean("loss/entropy", scores.entropy)
        if compare and self.plan.mode != "r3":  # this pass is a native one
            metrics.add_logprobs("rollout_vs_native", batch.rollout_logprobs, scores.logprobs)
        self._servers.add_logprobs(batch, scores.logprobs)

    def _observer(self, metrics: MetricAccumulator, watched: MicroBatch | None) -> RouteObserver:
        """Return an observer that compares the routers' own choice with the rollout's routes, in any mode.

        It is called for each chunk of each micro-batch; only the routes of `watched` are kept.
        """
        mode = self.plan.mode

        def compare(batch: MicroBatch, chunk: int, native: RouteBatch, replayed: RouteBatch | None) -> None:
            if batch.is_dummy:
                return
            layout = batch.layout.unshared  # every token of every sample counts
            rollout = captured_routes(batch, chunk, layout) if replayed is None else replayed.unshared(batch.layout)
            chosen = native.unshared(batch.layout)
            metrics.add_agreement(rollout, chosen)
            used = rollout if mode == "r3" else chosen
            metrics.add_load(used, layout)
            if mode != "off":
                metrics.add_coverage(used, layout, replayed=True)
            if batch is watched:
                batch.native_routes[chunk] = chosen
                batch.rollout_routes[chunk] = rollout if replayed is None else replayed

        return compare

    def _drop_unrouted(self, batch: MicroBatch, metrics: MetricAccumulator) -> None:
        """Take tokens out of the loss that were predicted without a route; those that stay keep their weights."""
        is_out = to_device(~has_route(batch.trajectories), batch.loss_weights.device)
        batch.loss_weights = batch.loss_weights.masked_fill(is_out, 0.0)
        if not batch.is_dummy:
            metrics.add_mean(DROPPED, is_out.double())

    def _counted(self, routing: Routing, metrics: MetricAccumulator) -> Routing:
        """Return a routing that counts the choices which the margin of its policy has decided."""
        if routing.action != "replay" or not routing.policy.has_margin:
            return routing

        def count(batch: MicroBatch, choices: Mapping[int, Tensor]) -> None:
            if not batch.is_dummy:
                metrics.add_choices(choices, batch.layout)

        return replace(routing, choices=count)

    def _check_alignment(self, watched: MicroBatch | None, step: int) -> dict[str, float]:
        if watched is not None:
            self._alignment.look_at(watched, step)
            watched.native_routes, watched.rollout_routes = {}, {}
        return self._alignment.check()

    def _score_natively(self, batches: Sequence[MicroBatch], metrics: MetricAccumulator) -> None:
        self._count("score", batches)
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
        checked: dict[str, float] = {}
        all_updates = [batches for _ in range(self._config.algorithm.num_iterations) for batches in updates]
        for index, batches in enumerate(all_updates):
            if not batches:  # no sequence of it is trained on
                continue
            self._count("train", batches)
            is_scored = index >= self._unscored.count
            share = 1 / len(all_updates)
            loss = self._loss(metrics, share, check=is_scored and not norms)
            if is_scored:
                result = self.backend.update(batches, loss, self._counted(self.plan.updating, metrics), lr)
            else:
                routing, old_pass = self._old_pass(batches, metrics, step, checked)
                attempt = self.new_metrics()
                try:
                    result = self.backend.update(
                        batches, self._loss(attempt, share, check=False), routing, lr, old_pass
                    )
                    metrics.merge(attempt)
                except _ExcludedServers:  # on every rank: again, without their tokens
                    result = self.backend.update(batches, loss, self.plan.updating, lr)
            norms.append(result.grad_norm)
            skipped += not result.applied
            self.skipped_in_a_row = 0 if result.applied else self.skipped_in_a_row + 1
            if progress is not None:
                progress(index + 1, len(all_updates))
            if self.skipped_in_a_row > self._config.optim.max_skipped_updates:
                break
        norm = sum(norms) / len(norms) if norms else 0.0
        return {**checked, "loss/grad_norm": norm, "loss/lr": lr, "loss/skipped": float(skipped)}

    def _old_pass(
        self, batches: Sequence[MicroBatch], metrics: MetricAccumulator, step: int, checked: dict[str, float]
    ) -> tuple[Routing, OldPass]:
        """Return the routing of an update that takes the place of the old-log-prob pass, and what it measures.

        checked   gets the metrics of the checks of routes and servers, which come before the optimizer step
        """
        compare, watched = self._unscored.compare, self._unscored.watched
        if watched is None and self.plan.observe:
            watched = self._alignment.choose(batches, step)
        checks = self.plan.mode != "off" and not self._has_checked_forward
        forward: dict[MicroBatch, Tensor] = {}

        def take(batch: MicroBatch, scores: Scores) -> None:
            self._add_old_logprobs(batch, scores, metrics, compare=compare)
            if checks:
                forward[batch] = scores.logprobs

        def finish() -> None:
            num_excluded = len(self._servers.excluded)
            checked.update(self._servers.judge())
            if self.plan.observe:
                checked.update(self._check_alignment(watched, step))
            if len(self._servers.excluded) > num_excluded:
                raise _ExcludedServers
            if checks:
                self._compare_with_scores(batches, forward, metrics)

        routing = replace(self.plan.scoring, observer=self._observer(metrics, watched))
        return self._counted(routing, metrics), OldPass(take, finish)

    def _compare_with_scores(
        self, batches: Sequence[MicroBatch], forward: Mapping[MicroBatch, Tensor], metrics: MetricAccumulator
    ) -> None:
        """Score the micro-batches of an update before its step: its forward must have given the same log-probs.

        Once, in the first step of a process: what makes a difference (dropout, kernels) does so from the beginning.
        """
        for batch, scores in zip(batches, self.backend.score(batches, self.plan.updating), strict=True):
            if scores is not None and not batch.is_dummy:
                metrics.add_maximum(FIRST_UPDATE, (forward[batch] - scores.logprobs).abs())
        self._has_checked_forward = True

    @property
    def excluded_servers(self) -> Mapping[str, str]:
        """Servers that are not believed, by URL, and why."""
        return self._servers.excluded

    @property
    def has_diverged(self) -> bool:
        """Whether too many consecutive updates had a gradient that is not finite."""
        return self.skipped_in_a_row > self._config.optim.max_skipped_updates

    def _loss(self, metrics: MetricAccumulator, share: float, *, check: bool) -> LossFunction:
        """Return the loss function of one update, which adds to the metrics; `share` is 1 / updates of the step.

        check   whether the weights are still those of the old-log-prob pass
        """

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
                num_sequences=len(batch.trajectories),
                trust=self._trust(batch, metrics),
            )
            output = self._policy_loss(inputs, self._loss_settings)
            if not batch.is_dummy:
                self._add_loss_metrics(output, metrics, share)
                metrics.add_logprobs("rollout_vs_train", batch.rollout_logprobs, logprobs)
                metrics.add_logprobs("old_vs_train", batch.old_logprobs, logprobs)
                if check:
                    metrics.add_maximum(FIRST_UPDATE, (logprobs.detach() - batch.old_logprobs).abs())
            return output.loss

        return loss

    def _trust(self, batch: MicroBatch, metrics: MetricAccumulator) -> Tensor | None:
        """Return (N,) the weights by router shift; None in the update that is the old-log-prob pass, and without."""
        if self.plan.shift_floor is None or (moved := batch.old_weights[0].shift) is None:
            return None
        shift = torch.zeros_like(batch.loss_weights)
        shift = shift.index_copy(0, batch.target_index, moved[target_rows(batch)].to(shift))
        trust = (-shift).exp()
        if not batch.is_dummy:
            metrics.add_mean(SHIFT_WEIGHT, trust)
            metrics.add_mean(SHIFT_FLOORED, (trust < self.plan.shift_floor).double())
        return trust.clamp(min=self.plan.shift_floor)

    def _add_loss_metrics(self, output: LossOutput, metrics: MetricAccumulator, share: float) -> None:
        if output.token_metrics.keys() != set(self._loss_metrics):
            raise LossError(
                f"policy loss {self._config.algorithm.loss!r} must return the same metrics each time",
                expected=", ".join(sorted(self._loss_metrics)) or "none",
                found=", ".join(sorted(output.token_metrics)) or "none",
            )
        metrics.add_total("loss/total", output.loss * share)
        for name, values in output.token_metrics.items():
            metrics.add_mean(f"loss/{name}", values)

    # ---- the end of the step ------------------------------------------------------------------------------------

    def summarize(self, metrics: MetricAccumulator, updates: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
        """Return the metrics of the step over all ranks; raise where the first update shows that replay failed."""
        self._add_planned(metrics)
        reduced = metrics.reduce(report_tokens=self.backend.reports_metrics)
        self.check_first_update(reduced.maxima[FIRST_UPDATE], next(filter(None, updates), ()))
        return reduced.metrics

    def _add_planned(self, metrics: MetricAccumulator) -> None:
        """Count the replayed passes since the step before, and those of them that were planned."""
        if (replay := self.backend.replay).takes_plans:
            passes, planned = replay.replayed_passes - self._passes[0], replay.planned_passes - self._passes[1]
            self._passes = replay.replayed_passes, replay.planned_passes
            metrics.add_mean(PLANNED, (torch.arange(passes, device=self.backend.device) < planned).double())

    def check_first_update(self, largest: float, batches: Sequence[MicroBatch] = ()) -> None:
        """Raise if old log-probs and those of the first update, in these micro-batches, are too far apart."""
        if self.plan.mode != "off":
            self._first_update.check(largest, self.backend, batches, self.plan.updating)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then constant or decaying to 0 after the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - 1 - config.warmup_steps) / max(steps - config.warmup_steps, 1)
    return config.lr * (1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)
