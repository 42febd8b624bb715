"""`Job`: the open resources of a training run, and the parts of a step. All ranks make every call."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from moe_replay.distributed.rank_watch import RankWatch
from moe_replay.distributed.ranks import any_rank, from_rank_0, raise_on_all_ranks, rank
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.rollout.engine import Engine
from moe_replay.routes.trace_file import TraceWriter
from moe_replay.train import launch
from moe_replay.train.backends.base import Backend
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import PROBE_TOLERANCE
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import Prompt, PromptStream
from moe_replay.train.drivers.pool import open_drivers
from moe_replay.train.engines import EngineStarter, StartedEngines, engines_of_all_nodes, open_engine
from moe_replay.train.inputs import Inputs, ReadData, epochs_in_words, read_inputs, steps_of_epochs
from moe_replay.train.learner import Learner
from moe_replay.train.preflight import check_config
from moe_replay.train.probe import ProbeSequence
from moe_replay.train.replay_mode import plan_replay
from moe_replay.train.rollouts import Rollouts
from moe_replay.train.run import rng
from moe_replay.train.run.checkpoint import Checkpoints, TrainerState
from moe_replay.train.run.completions import Completion, best_and_worst, write_completions
from moe_replay.train.run.folder import Run, RunWriteError
from moe_replay.train.run.interruption import InterruptHandler
from moe_replay.train.run.progress import ConsoleProgress
from moe_replay.train.shared_devices import SharedDevices
from moe_replay.train.sinks.registry import SinkError
from moe_replay.train.sources import Sources, sources_on_all_ranks
from moe_replay.train.step_rollout import evaluate, open_store, roll_out
from moe_replay.train.synced_engine import SyncedEngine
from moe_replay.train.trajectories.shared_batch import SharedBatch
from moe_replay.train.trajectories.store import InProcessStore, TrajectoryStore

ReportWriter = Callable[[Path], Path | None]
"""Takes the folder of a finished run, returns the path of the report written for it, if there is one."""


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
            watch = stack.enter_context(launch.process_group(device, config.backend.rank_timeout_s))
            stack.enter_context(launch.deterministic_kernels(config.replay.deterministic))
            rng.seed(config.seed)
            with watch:
                run = stack.enter_context(Run.open(config))
                progress = stack.enter_context(ConsoleProgress(config.steps))
                plan, chosen = plan_replay(config), ""
                if config.replay.mode == "auto":
                    chosen = "; chosen by replay.mode = auto (docs/training.md#replay-modes)"
                progress.message(f"routing replay: {plan.mode} ({plan.reason}); correction: {plan.correction}{chosen}")
                read = ReadData()
                with raise_on_all_ranks("checking the configuration"):
                    if rank() == 0:
                        read = check_config(config, starts_engine=engine is None)
                with interruption.nothing_to_save():  # it may download a model, or train the embedded one
                    sources = sources_on_all_ranks(config, progress.message)
                inputs: Inputs | None = None
                with raise_on_all_ranks("reading the data"):
                    if rank() == 0:
                        inputs = read_inputs(config, sources, progress.message, read)
                if config.data.epochs is not None:
                    config = _with_steps(config, inputs, run, progress)
                backend = launch.open_backend(config, sources.model, device)
                stack.callback(backend.close)
                job = cls(config, run, backend, progress, interruption, sources.model, write_report)
                stack.callback(job._checkpoints.close)
                job._watch = watch
                job._store = open_store(backend, config.backend.rank_timeout_s)
                stack.callback(job._store.close)
                if config.checkpoint.every or config.checkpoint.at_end:
                    job._checkpoints.check_room(backend, job._export_like)
                backend.offload()
                started = StartedEngines()
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
            self._progress.message(f"starting the rollout engine: {config.rollout.engine}")
            began = time.monotonic()
            engine = open_engine(config, sources.model, started)
            stack.callback(engine.close)
            self._progress.message(f"{engine.name}: ready after {time.monotonic() - began:.0f} s")
        stream = PromptStream(inputs.prompts, seed=config.seed, shuffle=config.data.shuffle)
        synced, drivers = SyncedEngine(engine), None
        if config.rollout.drivers > 1:
            if is_given:
                raise ConfigError("rollout.drivers: an engine that is given to train() cannot be shared", expected=1)
            drivers = open_drivers(config, sources.model, inputs.max_length, self._store.layer_sets, started)
            stack.callback(drivers.close)
            synced.followers = drivers
            self._progress.message(f"{config.rollout.drivers} rollout drivers: processes {drivers.pids}")
        self._rollouts = Rollouts(
            config, synced, stream, inputs.tokenizer, inputs.rewards, inputs.max_length, inputs.tools, drivers
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
        self.sync_weights(version=self.completed_steps)  # shows at once whether the engine accepts them

    def finish(self) -> Path:
        """Save, write the report, and return the folder of the run; nothing is saved before the first step."""
        if self.completed_steps and self.config.checkpoint.at_end:
            self.save(self.completed_steps)
        self._checkpoints.wait()
        if self._watch is not None:
            self._watch.stop()  # the other ranks have nothing left to do
        if rank() == 0:
            self._progress.message(f"run: {self._run.folder}")
            if self._write_report is not None and self.completed_steps and (told := self._report(self._write_report)):
                self._progress.message(f"report: {told}")
        return self._run.folder

    def _report(self, write: ReportWriter) -> str:
        """Write the report; if that fails, say so, since a finished run must not fail because of its report."""
        try:
            return str(write(self._run.folder) or "")
        except (MoeReplayError, OSError, ValueError) as error:
            return f"not written: {error}"

    # ---- parts of a step ----------------------------------------------------------------------------------------

    def rollout(self) -> SharedBatch:
        """Return the rollout batch of the next step: every rank has the headers, and gets its own share of the rest."""
        batch = roll_out(
            self._rollouts,
            self._store,
            self._devices,
            self.completed_steps,
            refit=partial(self._refit, self.completed_steps),
            progress=partial(self._progress.phase, "rollout"),
        )
        self.backend.reload()
        return batch

    def begin_rollout(self, step: int) -> None:
        """Begin to sample a step whose weights are in, while the step before is evaluated, logged and saved.

        Where trainer and engine take turns on the devices, a checkpoint needs them: then `rollout` begins with it.
        """
        if step > self.config.steps or (self._devices.take_turns and self.should_save(step - 1)):
            return
        self._refit(version=step - 1)  # servers that have joined get their share of the requests
        with raise_on_all_ranks("beginning to sample"):
            if self._rollouts is not None:
                self._rollouts.begin()

    def _refit(self, version: int) -> None:
        """Send the weights again if a server has lost them; all ranks take part."""
        lost = False
        with raise_on_all_ranks("asking the servers for their weights"):
            lost = self._rollouts is not None and self._rollouts.engine.lacks_weights()
        if any_rank(lost):
            self._progress.message("a rollout server has restarted: it is sent the weights again")
            self.sync_weights(version)

    def report_updates(self, done: int, total: int) -> None:
        """Show how many updates of this step are done."""
        self._progress.phase("train", done, total)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Give the engine the policy's weights, and check on the probe that it computes with them; return metrics."""
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
        if synced.kind != self._weights_kind:
            self._weights_kind = synced.kind
            self._progress.message(f"weights reach the engine by {synced.kind} ({synced.reason})")
        return synced.metrics()

    def evaluate(self, step: int) -> dict[str, float]:
        """Return mean rewards on the evaluation prompts if this step evaluates, else nothing."""
        every = self.config.eval.every
        if not every or step % every:
            return {}
        refit = partial(self._refit, step)
        return evaluate(self._rollouts, self._eval_prompts, self.config.eval.temperature, refit=refit)

    def should_compare(self, step: int) -> bool:
        """Whether this step also scores its samples without replay."""
        every = self.config.replay.compare_every
        return bool(every) and step % every == 0

    # ---- logs and checkpoints -----------------------------------------------------------------------------------

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a finished step."""
        self.completed_steps = step
        with raise_on_all_ranks("writing the metrics"), self._writing(f"the metrics of step {step}"):
            self._run.log(step, {**metrics, **self._checkpoints.metrics()})
        self._progress.step(step, metrics)

    def save_traces(self, step: int, batch: SharedBatch) -> None:
        """Write the routes of the first `log.traces` trajectories to the run's folder."""
        kept = range(len(batch.headers))[: self.config.log.traces]
        if not kept:
            return
        with raise_on_all_ranks("writing traces"), self._writing(f"the traces of step {step}"):
            if rank() == 0:
                self._run.traces.mkdir(exist_ok=True)
                path = self._run.traces / f"step-{step:08d}.mrt"
                path.unlink(missing_ok=True)  # from before a restart
                path.with_name(f"{path.name}.partial").unlink(missing_ok=True)
                with TraceWriter(path) as writer:
                    for one in batch.whole(kept):
                        writer.append(one.trace)

    def save_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Write the texts of the step to the run's folder, and show some of them."""
        if not self.config.log.completions:
            return
        with raise_on_all_ranks("writing completions"), self._writing(f"the completions of step {step}"):
            if completions:
                write_completions(self._run.folder, step, completions)
        self._progress.completions(best_and_worst(completions, self.config.log.shown_completions))

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turn a failed write into an error that says what is kept."""
        try:
            yield
        except (OSError, SinkError) as error:
            if isinstance(error, SinkError) and not isinstance(error.__cause__, OSError):
                raise
            self._checkpoints.settle()
            kept = self._checkpoints.steps()
            raise RunWriteError(
                f"{what} could not be written to {self._run.folder}: {error}",
                found=f"{shutil.disk_usage(self._run.folder).free / 1e9:.2f} GB free",
                remedy=f"The checkpoint of step {kept[-1]} is kept: resume from it once there is space"
                if kept
                else "There is no checkpoint yet",
            ) from error

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due."""
        every = self.config.checkpoint.every
        return bool(every) and step % every == 0

    def save(self, step: int) -> None:
        """Write a checkpoint of this step unless there is one already; groups in flight are not part of it."""
        if self._devices.take_turns and self._rollouts is not None:
            self._rollouts.withdraw()  # the engine sleeps meanwhile
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
                remedy="Look at mismatch/* and loss/* of the last steps; lower optim.lr, or set algorithm.correction",
            )
        if self._interruption.stop_requested():
            self._progress.message("interrupted: saving" if step else "interrupted before the first step")
            self._interruption.stopped_after = step if step < self.config.steps else None
            return True
        return False

    @property
    def _export_like(self) -> Path | None:
        return self._base if self.config.checkpoint.export else None


def _with_steps(config: TrainConfig, inputs: Inputs | None, run: Run, progress: ConsoleProgress) -> TrainConfig:
    """Return the config with the number of steps that its epochs amount to, on every rank."""

    def count() -> str:
        assert inputs is not None
        return str(steps_of_epochs(config, len(inputs.prompts)))

    steps = int(from_rank_0(count, "counting the steps"))
    counted = config.model_copy(update={"steps": steps})
    run.update(counted)
    progress.plan(steps)
    if inputs is not None:
        progress.message(epochs_in_words(config, len(inputs.prompts)))
    return counted
