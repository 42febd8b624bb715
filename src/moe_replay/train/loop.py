"""The training loop: roll out, score, update, sync weights."""

from __future__ import annotations

from pathlib import Path

from moe_replay.rollout.engine import Engine
from moe_replay.train.clock import Clock
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.engines import EngineStarter
from moe_replay.train.job import Job, ReportWriter
from moe_replay.train.run.interruption import InterruptHandler


def train(
    config: TrainConfig,
    engine: Engine | None = None,
    write_report: ReportWriter | None = None,
    interruption: InterruptHandler | None = None,
    starter: EngineStarter | None = None,
) -> Path:
    """Train as configured, on all ranks that the launcher has started; return the folder of the run.

    `engine` is used in place of the one that the config names; the caller closes it.
    `write_report` is called on rank 0 with the folder of the finished run (see `moe_replay.report.run_report`).
    `interruption`, if given, is open already; its `stopped_after` says whether a signal has ended the run early.
    `starter` starts the engines that `cluster.engines` asks for; on rank 0.
    """
    with Job.open(config, engine, write_report, interruption, starter) as job:
        if job.should_stop(job.completed_steps):
            return job.finish()
        for step in range(job.completed_steps + 1, job.config.steps + 1):
            _take_step(job, step)
            if job.should_save(step):
                job.save(step)
            if job.should_stop(step):
                break
        return job.finish()


def _take_step(job: Job, step: int) -> None:
    """Take one step; the next one is sampled from the moment that the engine has its weights."""
    metrics, clock = job.learner.new_metrics(), Clock(job.backend.device)

    with clock("rollout"):
        batch = job.rollout()
    with clock("score"):
        updates = job.learner.prepare(batch)
        scored = job.learner.score(updates, metrics, step, compare=job.should_compare(step))
    with clock("train"):
        learned = job.learner.update(updates, metrics, step, job.report_updates)
        measured = job.learner.summarize(metrics, updates)
    with clock("sync"):
        synced = job.sync_weights(version=step)
    job.begin_rollout(step + 1)
    with clock("eval"):
        evaluated = job.evaluate(step)

    timed = clock.metrics(batch.num_tokens)
    job.log(step, {**batch.metrics, **scored, **learned, **measured, **synced, **evaluated, **timed})
    job.save_traces(step, batch)
    job.save_completions(step, batch.completions)
