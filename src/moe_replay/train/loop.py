"""The training loop: sample, score, learn, and give the engine what was learned."""

from __future__ import annotations

from pathlib import Path

from moe_replay.rollout.engine import Engine
from moe_replay.train.clock import Clock
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.job import Job, ReportWriter
from moe_replay.train.meters import Meters


def train(config: TrainConfig, engine: Engine | None = None, write_report: ReportWriter | None = None) -> Path:
    """Train as the config says, on all ranks that the launcher has started. The folder of the run.

    `engine` samples in place of the one that the config names; the caller closes it.
    `write_report` is called on rank 0 with the folder of the finished run (see `moe_replay.report.run_report`).
    """
    with Job.opened(config, engine, write_report) as job:
        for step in range(job.done + 1, config.steps + 1):
            meters, clock = Meters(job.backend.topology), Clock()

            with clock("rollout"):
                harvest = job.harvest()
            with clock("score"):
                updates = job.learner.prepare(harvest.trajectories)
                job.learner.score(updates, meters, step, compare=job.compares_in(step))
            with clock("train"):
                learned = job.learner.update(updates, meters, step, job.report_updates)
                measured = job.learner.summarize(meters)
            with clock("sync"):
                job.give_weights(version=step)
            with clock("eval"):
                evaluated = job.evaluate(step)

            timed = clock.metrics(sum(map(len, harvest.trajectories)))
            job.log(step, {**harvest.metrics, **learned, **measured, **evaluated, **timed})
            job.keep_traces(step, harvest.trajectories)
            if job.saves_after(step):
                job.save(step)
            if job.ends_after(step):
                break
        return job.finish()
