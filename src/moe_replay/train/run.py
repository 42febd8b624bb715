"""`Job`: the open resources of a training run, and the phases of a step. Collective: every rank makes each call."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from moe_replay.distributed.rank_watch import RankWatch
from moe_replay.distributed.ranks import any_rank, from_rank_0, raise_on_all_ranks, rank, world_size
from moe_replay.engines.base import Engine
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.records import Completion, MicroBatch, RolloutBatch
from moe_replay.routes.trace_file import TraceWriter
from moe_replay.train.backends.base import Backend
from moe_replay.train.checkpoint import rng
from moe_replay.train.checkpoint.checkpoint import Checkpoints, TrainerState
from moe_replay.train.config.checks import warnings
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.one_copy import two_copies_because
from moe_replay.train.config.sections import PROBE_TOLERANCE
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.learn.learner import Learner
from moe_replay.train.learn.probe import ProbeSequence
from moe_replay.train.learn.replay_mode import old_logprobs_in_words, plan_replay
from moe_replay.train.output.clock import SpeedMeter
from moe_replay.train.output.completions import best_and_worst, write_completions
from moe_replay.train.output.console import ConsoleProgress
from moe_replay.train.output.interruption import InterruptHandler
from moe_replay.train.output.run_folder import Run, RunWriteError
from moe_replay.train.output.sinks import SinkError
from moe_replay.train.rollout.prompts import Prompt, PromptStream
from moe_replay.train.rollout.rollouts import Rollouts
from moe_replay.train.rollout.step_rollout import evaluate, open_store, roll_out
from moe_replay.train.setup import launch
from moe_replay.train.setup.engines import EngineStarter, StartedEngines, engines_of_all_nodes, open_engine
from moe_replay.train.setup.inputs import Inputs, ReadData, epochs_in_words, read_inputs, steps_of_epochs
from moe_replay.train.setup.preflight import check_config
from moe_replay.train.setup.sources import Sources, sources_on_all_ranks
from moe_replay.train.sync.shared_devices import SharedDevices
from moe_replay.train.sync.synced_engine import SyncedEngine
from moe_replay.train.trajectories.store import InProcessStore, TrajectoryStore
from moe_replay.train.workers.pool import open_workers
from moe_replay.utils.device import peak_tflops
from moe_replay.weights.model_folder import read_config
from moe_replay.weights.model_sizes import ModelSizes

logger = logging.getLogger(__name__)

ReportWriter = Callable[[Path], Path | None]
"""Takes the run folder, returns the path of the report if one was written."""


class DivergedError(MoeReplayError):
    """Too many consecutive updates had non-finite gradients, or the policy's log-probs are not finite."""

    exit_status = ExitStatus.CHECK_FAILED


class Job:
    """A training run in progress.

    completed_steps   steps done so far, those before a resume included
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        backend: Backend,
        progress: ConsoleProgress,
        interruption: InterruptHandler,
        base: str,
        write_report: ReportWriter | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.learner = Learner(config, backend)
        self.completed_steps = 0
        self.speed = _speed_meter(config, backend, base)
        self._weights_kind = ""
        self._run = run
        self._base = Path(base)
        self._progress = progress
        self._interruption = interruption
        self._write_report = write_report
        self._checkpoints = Checkpoints.of(config, run.checkpoints)
        self._rollouts: Rollouts | None = None  # on rank 0 only
        self._devices = SharedDevices(config, backend)
        self._store: TrajectoryStore = InProcessStore()
        self._rows_identity = ""
        self._eval_prompts: Sequence[Prompt] = ()
        self._probe: ProbeSequence | None = None
        self._watch: RankWatch | None = None
        self._started_at = time.monotonic()
        self._seconds_before_resume = 0.0

    # ---- start and end ------------------------------------------------------------------------------------------

    @classmethod
    @contextmanager
    def open(
        cls,
        config: TrainConfig,
        engine: Engine | None = None,
        write_report: ReportWriter | None = None,
        interruption: InterruptHandler | None = None,
        starter: EngineStarter | None = None,
    ) -> Iterator[Job]:
        """Open backend and engine, resume from a checkpoint if there is one, and sync the weights."""
        with ExitStack() as stack:
            interruption = interruption or stack.enter_context(InterruptHandler())
            launch.end_with_launcher()
            device = launch.choose_device(config)
            watch = stack.enter_context(launch.process_group(device, config.backend.heartbeat_timeout_s))
            stack.enter_context(launch.deterministic_kernels(config.replay.deterministic))
            rng.seed(config.seed)
            with watch:
                run = stack.enter_context(Run.open(config))
                progress = stack.enter_context(ConsoleProgress(config.steps))
                plan, chosen = plan_replay(config), ""
                if config.replay.mode == "auto":
                    chosen = "; chosen by replay.mode = auto (docs/training.md#replay-modes)"
                progress.message(f"routing replay: {plan.mode} ({plan.reason}); correction: {plan.correction}{chosen}")
                progress.message(f"old log-probs: {old_logprobs_in_words(config)}")
                for warning in [*warnings(config), *launch.crowding(config)]:
                    progress.message(f"warning: {warning}")
                read = ReadData()
                with raise_on_all_ranks("checking the configuration"):
                    if rank() == 0:
                        read = check_config(config, engine)
                with interruption.nothing_to_save():  # it may download a model, or train the embedded one
                    sources = sources_on_all_ranks(config, progress.message)
                inputs: Inputs | None = None
                with raise_on_all_ranks("reading the data"):
                    if rank() == 0:
                        inputs = read_inputs(config, sources, progress.message, read)
                if config.data.epochs is not None:
                    config = _with_steps(config, inputs, run, progress)
                export = None
                if config.rollout.lora:
                    with interruption.nothing_to_save(), raise_on_all_ranks("opening the rollout engine"):
                        engine, export = _share_weights(config, sources.model, engine, device, progress, stack)
                backend = launch.open_backend(config, sources.model, device, progress.message, export)
                stack.callback(backend.close)
                job = cls(config, run, backend, progress, interruption, sources.model, write_report)
                stack.callback(job._checkpoints.close)
                job._watch = watch
                job._store = open_store(backend, config.backend.heartbeat_timeout_s)
                stack.callback(job._store.close)
                if config.checkpoint.every or config.checkpoint.at_end:
                    job._checkpoints.check_room(backend, job._export_like)
                backend.offload()
                started = StartedEngines()
                with interruption.nothing_to_save():
                    if engine is None:
                        started = stack.enter_context(engines_of_all_nodes(config, sources.model, starter))
                    with raise_on_all_ranks("opening the rollout engine"):
                        if inputs is not None:
                            job._open_rollouts(sources, inputs, engine, started, stack)
                backend.reload()
                job._checkpoints.require_equal(data=from_rank_0(lambda: job._rows_identity, "reading the data"))
                job._probe = ProbeSequence.broadcast(job._rollouts.probe_tokens if job._rollouts else None, backend)
                job._probe.check_packing(backend, config.rollout.probe_tolerance or PROBE_TOLERANCE)
                job._resume()
                yield job

    def _open_rollouts(
        self, sources: Sources, inputs: Inputs, engine: Engine | None, started: StartedEngines, stack: ExitStack
    ) -> None:
        config, is_given = self.config, engine is not None
        self._rows_identity = inputs.identity
        self._eval_prompts = inputs.eval_prompts
        if engine is None:
            engine = _start_engine(config, sources.model, self._progress, stack, started)
        stream = PromptStream(inputs.prompts, seed=config.seed, shuffle=config.data.shuffle)
        synced, workers = SyncedEngine(engine), None
        if config.rollout.workers > 1:
            if is_given:
                raise ConfigError("rollout.workers: an engine that is given to train() cannot be shared", expected=1)
            workers = open_workers(config, sources.model, inputs.max_length, self._store.layer_sets, started)
            stack.callback(workers.close)
            synced.followers = workers
            self._progress.message(f"{config.rollout.workers} rollout workers: processes {workers.pids}")
        self._rollouts = Rollouts(
            config,
            synced,
            stream,
            inputs.tokenizer,
            inputs.rewards,
            inputs.max_length,
            inputs.tools,
            workers,
            self._store,
        )
        stack.callback(self._rollouts.close)
        self._devices.start_with(self._rollouts.engine)

    def _resume(self) -> None:
        state = self._checkpoints.restore(self.backend, self._progress.message) if self.config.resume else None
        if state is not None:
            self.completed_steps = state.step
            self._seconds_before_resume = state.seconds
            self.learner.skipped_in_a_row = int(state.counters.get("skipped_in_a_row", 0))
            if self._rollouts is not None:
                self._rollouts.restore(state.data)
            self._progress.resume(self.completed_steps)
            self._progress.message(f"resuming after step {self.completed_steps}{state.lost}")
        self._run.begin(after=self.completed_steps)
        self.sync_weights(version=self.completed_steps)  # fails early if the engine does not accept them

    def finish(self) -> Path:
        """Save, write the report, and return the run folder; nothing is saved before the first step."""
        if self.completed_steps and self.config.checkpoint.at_end:
            self.save(self.completed_steps)
        self._checkpoints.wait()
        if self._watch is not None:
            self._watch.stop()  # the other ranks have nothing left to do
        if rank() == 0:
            self._progress.message(f"run: {self._run.folder}")
            if self._write_report is not None and self.completed_steps and (path := self._report(self._write_report)):
                self._progress.message(f"report: {path}")
        return self._run.folder

    def _report(self, write: ReportWriter) -> str:
        """Write the report; if that fails, say so, since a finished run must not fail because of its report."""
        try:
            return str(write(self._run.folder) or "")
        except (MoeReplayError, OSError, ValueError) as error:
            return f"not written: {error}"

    # ---- phases of a step ----------------------------------------------------------------------------------------

    def rollout(self) -> RolloutBatch:
        """Return the rollout batch of the next step: headers on every rank, bodies in the store."""
        batch = roll_out(
            self._rollouts,
            self._devices,
            self.completed_steps,
            resend_weights=partial(self._resend_lost_weights, self.completed_steps),
            progress=partial(self._progress.phase, "rollout"),
        )
        self.backend.reload()
        return batch

    def begin_rollout(self, step: int) -> None:
        """Start sampling a step whose weights have arrived, while the step before is evaluated, logged and saved.

        Where trainer and engine take turns on the devices, a checkpoint needs them: then `rollout` starts it.
        """
        if step > self.config.steps or (self._devices.take_turns and self.should_save(step - 1)):
            return
        self._resend_lost_weights(version=step - 1)  # servers that have joined take part from now on
        with raise_on_all_ranks("beginning to sample"):
            if self._rollouts is not None:
                self._rollouts.begin()

    def _resend_lost_weights(self, version: int) -> None:
        """Collective: send the weights again if a server has lost them."""
        lost = False
        with raise_on_all_ranks("asking the servers for their weights"):
            lost = self._rollouts is not None and self._rollouts.engine.lacks_weights()
        if any_rank(lost):
            self._progress.message("rollout server restarted, resending weights")
            self.sync_weights(version)

    def prepare(self, batch: RolloutBatch) -> list[list[MicroBatch]]:
        return self.learner.prepare(batch, self._store)

    def exclude_servers(self) -> None:
        """Do not sample again from servers that are not believed."""
        if self._rollouts is not None:
            for url, cause in self.learner.excluded_servers.items():
                self._rollouts.engine.exclude(url, cause)

    def report_updates(self, done: int, total: int) -> None:
        self._progress.phase("train", done, total)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Send the policy's weights to the engine and verify them on the probe; return metrics."""
        self.backend.reload()
        probe = self._probe.score(self.backend, self.config.rollout) if self._probe is not None else None
        with raise_on_all_ranks("scoring the probe"):
            if probe is not None and not np.isfinite(probe.logprobs).all():
                raise DivergedError(
                    f"training has diverged: the policy's own log-probs are not finite after step {version}",
                    found=f"checkpoints of earlier steps in {self._run.checkpoints}",
                    remedy="Resume from them with a lower optim.lr",
                )
        if not self.config.rollout.partial_rollout:
            with raise_on_all_ranks("finishing the samples in flight"):
                if self._rollouts is not None and version != self._rollouts.engine.weight_version:
                    self._rollouts.finish_running()
        synced = self._devices.update_engine(version, probe)
        if synced.transport != self._weights_kind:
            self._weights_kind = synced.transport
            self._progress.message(f"weights reach the engine by {synced.transport} ({synced.reason})")
        return synced.metrics()

    def evaluate(self, step: int) -> dict[str, float]:
        """Return mean rewards on the evaluation prompts if this step evaluates, else nothing."""
        if not _is_due(step, self.config.eval.every):
            return {}
        resend = partial(self._resend_lost_weights, step)
        return evaluate(self._rollouts, self._eval_prompts, self.config.eval.temperature, resend_weights=resend)

    def should_compare(self, step: int) -> bool:
        """Whether this step also scores its samples without replay."""
        return _is_due(step, self.config.replay.score_native_every)

    # ---- logs and checkpoints -----------------------------------------------------------------------------------

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.completed_steps = step
        with raise_on_all_ranks("writing the metrics"), self._writing(f"the metrics of step {step}"):
            self._run.log(step, {**metrics, **self._checkpoints.metrics()})
        self._progress.step(step, metrics)

    def save_traces(self, step: int, batch: RolloutBatch) -> None:
        """Write the routes of the first `log.traces` trajectories to the run folder."""
        numbers = range(len(batch.headers))[: self.config.log.traces]
        if not numbers:
            return
        with raise_on_all_ranks("writing traces"), self._writing(f"the traces of step {step}"):
            if rank() == 0:
                self._run.traces.mkdir(exist_ok=True)
                path = self._run.traces / f"step-{step:08d}.mrt"
                path.unlink(missing_ok=True)  # from before a restart
                path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
                with TraceWriter(path) as writer:
                    for trajectory in self._store.whole(batch, numbers):
                        writer.append(trajectory.trace)

    def save_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Write the completions of the step to the run folder, and show some of them."""
        if not self.config.log.completions:
            return
        with raise_on_all_ranks("writing completions"), self._writing(f"the completions of step {step}"):
            if completions:
                write_completions(self._run.folder, step, completions)
        self._progress.completions(best_and_worst(completions, self.config.log.num_completions_to_print))

    @contextmanager
    def _writing(self, content: str) -> Iterator[None]:
        """Turn a failed write into an error that names the newest checkpoint."""
        try:
            yield
        except (OSError, SinkError) as error:
            if isinstance(error, SinkError) and not isinstance(error.__cause__, OSError):
                raise
            self._checkpoints.settle()
            steps = self._checkpoints.steps()
            raise RunWriteError(
                f"{content} could not be written to {self._run.folder}: {error}",
                found=f"{shutil.disk_usage(self._run.folder).free / 1e9:.2f} GB free",
                remedy=f"The checkpoint of step {steps[-1]} is kept: resume from it once there is space"
                if steps
                else "There is no checkpoint yet",
            ) from error

    def should_save(self, step: int) -> bool:
        return _is_due(step, self.config.checkpoint.every)

    def save(self, step: int) -> None:
        """Write a checkpoint of this step unless there is one already; groups in flight are not in it."""
        if self._devices.take_turns and self._rollouts is not None:
            self._rollouts.withdraw()  # the engine sleeps while a checkpoint is written
        state = TrainerState(
            step=step,
            version=step,
            data=self._rollouts.state if self._rollouts is not None else {},
            counters={
                "skipped_in_a_row": float(self.learner.skipped_in_a_row),
                "optimizer": float(self.config.checkpoint.optimizer),
            },
            seconds=self._seconds_before_resume + time.monotonic() - self._started_at,
        )
        with self._devices.trainer_awake():
            self._checkpoints.save(self.backend, state, self._export_like)

    def should_stop(self, step: int) -> bool:
        """Whether an interruption was requested; raises if training has diverged."""
        if self.learner.has_diverged:
            self.save(step)
            raise DivergedError(
                f"{self.learner.skipped_in_a_row} updates in a row had non-finite gradients and were skipped",
                found=f"weights of the last finite update, saved after step {step} in {self._run.checkpoints}",
                remedy="Look at mismatch/* and loss/*; lower optim.lr, or set algorithm.rollout_correction",
            )
        if self._interruption.stop_requested():
            self._progress.message("interrupted: saving" if step else "interrupted before the first step")
            self._interruption.stopped_after = step if step < self.config.steps else None
            return True
        return False

    @property
    def _export_like(self) -> Path | None:
        return self._base if self.config.checkpoint.export else None


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _start_engine(
    config: TrainConfig,
    folder: str,
    progress: ConsoleProgress,
    stack: ExitStack,
    started: StartedEngines | None = None,
    *,
    share_weights: bool = False,
) -> Engine:
    progress.message(f"starting the rollout engine: {config.rollout.engine}")
    began = time.monotonic()
    engine = open_engine(config, folder, started, share_weights=share_weights)
    stack.callback(engine.close)
    progress.message(f"{engine.name}: ready after {time.monotonic() - began:.0f} s")
    return engine


def _share_weights(
    config: TrainConfig,
    folder: str,
    engine: Engine | None,
    device: torch.device,
    progress: ConsoleProgress,
    stack: ExitStack,
) -> tuple[Engine | None, str | None]:
    """Return the engine if it has to be there before the trainer, and what the trainer opens its weights with.

    engine   that was given to the run; started here only if its weights are to be shared
    """
    refusal = two_copies_because(config, world_size(), device.type)
    if refusal is None and engine is not None and not engine.shares_weights:
        refusal = "the engine was started without share_weights"
    if refusal is not None:
        progress.message(f"frozen weights: trainer and engine have a copy each ({refusal})")
        return engine, None
    engine = engine or _start_engine(config, folder, progress, stack, share_weights=True)
    return engine, engine.share_weights()


def _speed_meter(config: TrainConfig, backend: Backend, folder: str) -> SpeedMeter:
    model, sizes = config.model, None
    if rank() == 0:
        try:
            settings = read_config(folder, trust_remote_code=model.trust_remote_code)
            sizes = ModelSizes.of(settings, backend.topology, trust_remote_code=model.trust_remote_code)
        except (MoeReplayError, AttributeError, TypeError) as error:  # a config with other names than most models'
            logger.info("no FLOPs are counted: the sizes of the model are not known (%s)", error)
    return SpeedMeter(
        sizes=sizes,
        gpus=world_size(),
        copies=backend.data_size,
        peak=peak_tflops(backend.device, getattr(torch, model.dtype)),
        frozen=model.lora_rank > 0,
    )


def _with_steps(config: TrainConfig, inputs: Inputs | None, run: Run, progress: ConsoleProgress) -> TrainConfig:
    """Collective: return the config with the number of steps in its epochs."""

    def count() -> int:
        assert inputs is not None
        return steps_of_epochs(config, len(inputs.prompts))

    steps = from_rank_0(count, "counting the steps")
    with_steps = config.model_copy(update={"steps": steps})
    run.update(with_steps)
    progress.plan(steps)
    if inputs is not None:
        progress.message(epochs_in_words(config, len(inputs.prompts)))
    return with_steps
