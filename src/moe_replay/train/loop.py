"""The training loop: roll out, score, update, sync weights."""

from __future__ import annotations

from pathlib import Path

from moe_replay.engines.base import Engine
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.output.clock import Clock
from moe_replay.train.output.interruption import InterruptHandler
from moe_replay.train.run import Job, ReportWriter
from moe_replay.train.setup.engines import EngineStarter
from moe_replay.utils.processes import exits_are_failures


def train(
    config: TrainConfig,
    engine: Engine | None = None,
    write_report: ReportWriter | None = None,
    interruption: InterruptHandler | None = None,
    starter: EngineStarter | None = None,
) -> Path:
    """Train as configured, on all ranks that the launcher has started; return the run folder.

    `engine` is used in place of the one that the config names; the caller closes it.
    `write_report` is called on rank 0 with the folder of the finished run (see `moe_replay.report.run_report`).
    `interruption`, if given, is open already; its `stopped_after` says whether a signal has ended the run early.
    `starter` starts the engines of `cluster.engines`; on rank 0.
    """
    with exits_are_failures(), Job.open(config, engine, write_report, interruption, starter) as job:
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
    """Take one step; sampling of the next one starts as soon as the engine has its weights."""
    metrics, clock = job.learner.new_metrics(), Clock(job.backend.device)

    with clock("rollout"):
        batch = job.rollout()
    with clock("score"):
        updates = job.prepare(batch)
        scored = job.learner.score(updates, metrics, step, compare=job.should_compare(step))
    with clock("train"):
        learned = job.learner.update(updates, metrics, step, job.report_updates)
        job.exclude_servers()
        measured = job.learner.summarize(metrics, updates)
    with clock("sync"):
        synced = job.sync_weights(version=step)
    job.begin_rollout(step + 1)
    with clock("eval"):
        evaluated = job.evaluate(step)

    timed = clock.metrics(batch.num_tokens)
    timed |= job.speed.metrics(job.learner.passes, timed)
    job.log(step, {**batch.metrics, **scored, **learned, **measured, **synced, **evaluated, **timed})
    job.save_traces(step, batch)
    job.save_completions(step, batch.completions)
