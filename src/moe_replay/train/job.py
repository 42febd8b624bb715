"""`Job`: everything that a training run holds open, and what the loop asks of it. All ranks make every call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moe_replay.distributed.collectives import broadcast_bytes
from moe_replay.distributed.ranks import raise_on_all_ranks, rank
from moe_replay.errors import MoeReplayError
from moe_replay.rollout.engine import Engine
from moe_replay.routes.trace_file import TraceWriter
from moe_replay.train import launch, trajectory
from moe_replay.train.backends.base import Backend
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import Prompt, PromptStream, load_prompts, read_rows
from moe_replay.train.engines import longest_sequence, open_engine
from moe_replay.train.learner import Learner
from moe_replay.train.probe import ProbeSequence
from moe_replay.train.rewards import load_reward
from moe_replay.train.rollouts import Harvest, Rollouts
from moe_replay.train.run.checkpoint import Checkpoints, TrainerState
from moe_replay.train.run.folder import Run, fixed_settings
from moe_replay.train.run.interruption import Interruption
from moe_replay.train.run.progress import Progress
from moe_replay.train.sources import Sources, find_sources, load_tokenizer
from moe_replay.train.trajectory import Trajectory

ReportWriter = Callable[[Path], Path]
"""Folder of a finished run -> the report written for it."""


class DivergedError(MoeReplayError):
    """Too many updates in a row had gradients that are not finite."""


class Job:
    """A run under way.

    done   steps that are done
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        backend: Backend,
        progress: Progress,
        interruption: Interruption,
        base: str,
        write_report: ReportWriter | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.learner = Learner(config, backend)
        self.done = 0
        self._run = run
        self._base = Path(base)
        self._progress = progress
        self._interruption = interruption
        self._write_report = write_report
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep, settings=fixed_settings(config))
        self._rollouts: Rollouts | None = None  # of the first rank
        self._evaluated: Sequence[Prompt] = ()
        self._probe: ProbeSequence | None = None
        self._began = time.monotonic()
        self._seconds_before = 0.0
        self._ends = False

    # ---- begin and end ------------------------------------------------------------------------------------------

    @classmethod
    @contextmanager
    def opened(
        cls, config: TrainConfig, engine: Engine | None = None, write_report: ReportWriter | None = None
    ) -> Iterator[Job]:
        """Open all parts, go on from a checkpoint if there is one, and give the engine the weights to begin with."""
        with ExitStack() as stack:
            device = launch.choose_device(config)
            stack.enter_context(launch.process_group(device))
            run = stack.enter_context(Run.open(config))
            progress = stack.enter_context(Progress(config.steps))
            interruption = stack.enter_context(Interruption())
            sources = _agreed_sources(config, progress)
            backend = launch.open_backend(config, sources.model, device)
            stack.callback(backend.close)
            job = cls(config, run, backend, progress, interruption, sources.model, write_report)
            job._checkpoints.check_room(backend, job._export_like)
            with raise_on_all_ranks("opening the rollout engine"):
                if rank() == 0:
                    job._open_rollouts(sources, engine, stack)
            job._probe = ProbeSequence.shared(job._rollouts.example if job._rollouts else None, backend)
            job._probe.check_stays_apart(backend, config.rollout.probe_tolerance)
            job._resume()
            yield job

    def _open_rollouts(self, sources: Sources, engine: Engine | None, stack: ExitStack) -> None:
        config = self.config
        tokenizer = load_tokenizer(sources.model)
        max_length = longest_sequence(config, sources.model)
        max_prompt = min(config.data.max_prompt_tokens, max_length - 1)
        rows = read_rows(sources.data)
        prompts = load_prompts(rows, tokenizer, max_prompt)
        if len(prompts) < len(rows):
            self._progress.say(
                f"{len(rows) - len(prompts)} of {len(rows)} prompts are left out: beyond {max_prompt} tokens"
            )
        if config.eval.every and sources.eval:
            self._evaluated = load_prompts(read_rows(sources.eval), tokenizer, max_prompt)[: config.eval.prompts]
        weights = config.reward.weights or (1.0,) * len(config.reward.functions)
        rewards = [load_reward(*named) for named in zip(config.reward.functions, weights, strict=True)]
        if engine is None:
            self._progress.say(f"starting the rollout engine: {config.rollout.engine}")
            engine = open_engine(config, sources.model)
            stack.callback(engine.close)
        stream = PromptStream(prompts, seed=config.seed, shuffle=config.data.shuffle)
        self._rollouts = Rollouts(config, engine, stream, tokenizer, rewards, max_length)
        stack.callback(self._rollouts.close)

    def _resume(self) -> None:
        state = self._checkpoints.restore(self.backend) if self.config.resume else None
        if state is not None:
            self.done = state.step
            self._seconds_before = state.seconds
            self.learner.skipped_in_a_row = int(state.counters.get("skipped_in_a_row", 0))
            if self._rollouts is not None:
                self._rollouts.restore(state.data)
            self._progress.resume(self.done)
            self._progress.say(f"going on after step {self.done}")
        self._run.begin(after=self.done)
        plan = self.learner.plan
        self._progress.say(f"routing replay: {plan.mode} ({plan.reason}); correction: {plan.correction}")
        self.give_weights(version=self.done)  # shows at once whether the engine can take them

    def finish(self) -> Path:
        """Save, and write the report. The folder of the run."""
        self.save(self.done)
        if rank() == 0:
            self._progress.say(f"run: {self._run.folder}")
            if self._write_report is not None:
                self._progress.say(f"report: {self._report(self._write_report)}")
        return self._run.folder

    def _report(self, write: ReportWriter) -> str:
        """Write the report; a finished run never fails because of its report."""
        try:
            return str(write(self._run.folder))
        except (MoeReplayError, OSError, ValueError) as error:
            return f"not written: {error}"

    # ---- parts of a step ----------------------------------------------------------------------------------------

    def harvest(self) -> Harvest:
        """The samples of the next step: the first rank has them made, and every rank gets them."""
        content, metrics = None, {}
        with raise_on_all_ranks("sampling"):
            if self._rollouts is not None:
                made = self._rollouts.next(self.done, lambda done, total: self._progress.phase("rollout", done, total))
                content, metrics = trajectory.to_bytes(made.trajectories), made.metrics
                if self.config.rollout.sleep:
                    self._rollouts.engine.sleep()
        return Harvest(trajectory.from_bytes(broadcast_bytes(content)), metrics)

    def report_updates(self, done: int, total: int) -> None:
        """How far the updates of this step are."""
        self._progress.phase("train", done, total)

    def give_weights(self, version: int) -> None:
        """The engine samples with the policy's weights from now on."""
        probe = self._probe.scored(self.backend, self.config.rollout) if self._probe is not None else None
        weights = self.backend.weights()
        with raise_on_all_ranks("updating the weights of the engine"):
            if self._rollouts is None:
                for _ in weights:  # gathering them is the work of all ranks
                    pass
                return
            if self.config.rollout.sleep:
                self._rollouts.engine.wake()
            self._rollouts.engine.update_weights(weights, version, probe)

    def evaluate(self, step: int) -> dict[str, float]:
        """Rewards on the prompts for evaluation, where this step has one."""
        every = self.config.eval.every
        found: dict[str, float] = {}
        with raise_on_all_ranks("evaluation"):
            if every and step % every == 0 and self._rollouts is not None and self._evaluated:
                found = self._rollouts.evaluate(self._evaluated, self.config.eval.temperature)
        return found

    def compares_in(self, step: int) -> bool:
        """Whether this step also scores its samples without replay."""
        every = self.config.replay.compare_every
        return bool(every) and step % every == 0

    # ---- what is kept -------------------------------------------------------------------------------------------

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The numbers of a finished step."""
        self.done = step
        self._run.log(step, metrics)
        self._progress.step(step, metrics)

    def keep_traces(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """The routes of the first few samples, where the config asks for them."""
        kept = trajectories[: self.config.log.traces]
        if not kept or rank() != 0:
            return
        self._run.traces.mkdir(exist_ok=True)
        path = self._run.traces / f"step-{step:08d}.mrt"
        path.unlink(missing_ok=True)  # of a step that is done again after a restart
        with TraceWriter(path) as writer:
            for one in kept:
                writer.append(one.trace)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due."""
        every = self.config.checkpoint.every
        return bool(every) and step % every == 0

    def save(self, step: int) -> None:
        """A checkpoint of this step; nothing where there is one already."""
        state = TrainerState(
            step=step,
            version=step,
            data=self._rollouts.state if self._rollouts is not None else {},
            counters={"skipped_in_a_row": float(self.learner.skipped_in_a_row)},
            seconds=self._seconds_before + time.monotonic() - self._began,
        )
        self._checkpoints.save(self.backend, state, self._export_like)

    def ends_after(self, step: int) -> bool:
        """Whether somebody wants to stop; raises where it makes no sense to go on."""
        if self.learner.has_diverged:
            self.save(step)
            raise DivergedError(
                f"{self.learner.skipped_in_a_row} updates in a row had gradients that are not finite",
                found=f"the weights are those before them; saved after step {step} in {self._run.checkpoints}",
                remedy="Look at mismatch/* and loss/* of the last steps; lower optim.lr, or set algorithm.correction",
            )
        if self._interruption.asked(self.backend.device):
            self._progress.say("interrupted: saving")
            return True
        return False

    @property
    def _export_like(self) -> Path | None:
        return self._base if self.config.checkpoint.export else None


def _agreed_sources(config: TrainConfig, progress: Progress) -> Sources:
    """The first rank downloads or makes what is missing, before the others look."""
    found: Sources | None = None
    with raise_on_all_ranks("looking for model and data"):
        if rank() == 0:
            found = find_sources(config, progress.say)
    return found if found is not None else find_sources(config, progress.say)
