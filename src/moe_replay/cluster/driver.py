"""`run_on_ray`: the driver of a run on a Ray cluster. It places ranks and engines, and restarts what is lost.

Ranks run the same function as under torchrun; the driver knows nothing of training steps.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moe_replay.cluster.capacity import counted, wait_for_capacity
from moe_replay.cluster.connection import Connection, join_or_start
from moe_replay.cluster.engines import LOST_DELAY_S, EngineGroup, EnginePlacement
from moe_replay.cluster.layout import Layout, RankPlacement, engine_devices, is_possible, plan_resources
from moe_replay.cluster.ranks import SHUTDOWN_TIMEOUT_S, Lost, Outcome, TrainerGroup
from moe_replay.cluster.state_actor import NAMESPACE, DriverView, EngineList, RunState, actor_name
from moe_replay.errors import ExitStatus, MoeReplayError
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.output.location import run_folder
from moe_replay.utils.misc import one_line
from moe_replay.utils.signals import EndSignals

POLL_S, IDLE_POLL_S = 0.3, 1.0
"""Seconds between polls, while engines are starting and once they are ready."""
FORWARDED = (
    "CUBLAS_", "DATASETS_", "GLOO_", "HF_", "HUGGING_FACE_", "MKL_", "MLFLOW_", "MOE_REPLAY_", "NCCL_", "OMP_",
    "PYTORCH_", "TENSORBOARD_", "TOKENIZERS_", "TORCH_", "TQDM_", "TRANSFORMERS_", "VLLM_", "WANDB_",
)  # fmt: skip
"""Prefixes of the driver's environment variables that ranks and engines get; the rest comes from their node."""


class ClusterError(MoeReplayError):
    """A run on Ray whose ranks or engines failed, or were lost too often."""

    def __init__(self, problem: str, *, status: int = ExitStatus.FAILED, **parts: Any) -> None:
        super().__init__(problem, **parts)
        self.exit_status = status


def run_on_ray(config: TrainConfig, entry: Callable[..., None]) -> int:
    """Train on a Ray cluster and return the exit status; raise if the run fails.

    entry   trains on a rank: called there with the config and, on rank 0, an `EngineStarter`
    """
    if "RANK" in os.environ:
        raise ConfigError(
            'cluster.launcher = "ray" starts its own ranks, but this process was started by torchrun',
            remedy="Run the command once, without torchrun, or set cluster.launcher = torchrun",
        )
    folder = run_folder(config)
    config = config.model_copy(update={"output": folder})
    with join_or_start(config) as connection:
        run = RayRun(config, entry, connection, folder)
        with EndSignals(run.interrupt, end_after=2, farewell="ended without saving; the run resumes from its newest "
                        "checkpoint"):  # fmt: skip
            return run.train()


class RayRun:
    """One run: its state actor, its engines, and successive starts of the trainer."""

    def __init__(self, config: TrainConfig, entry: Callable[..., None], connection: Connection, folder: Path) -> None:
        import ray

        self._config, self._entry, self._folder = config, entry, folder
        self._logs = folder / "logs"
        self._logs.mkdir(exist_ok=True)
        self._environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        token = secrets.token_urlsafe(32)
        self._layout = plan_resources(config, ray.cluster_resources())
        remote: Any = ray.remote(RunState)
        self._state = remote.options(
            name=actor_name(folder.name), namespace=NAMESPACE, num_cpus=0, scheduling_strategy=_on_this_node()
        ).remote(config.cluster.engines or 0, token, not self._layout.colocated, self._layout.engine)
        self._trainer_bundles: Any = None  # placement group of the trainer
        self._placements: list[RankPlacement] = []
        self._engines = EngineGroup(
            self._layout,
            config.cluster.max_restarts,
            (token, os.getcwd(), self._environment),
            lambda index: str(self._logs / f"engine-{index}.log"),
            self._place_engine,
            self._log,
        )
        self._published = EngineList()
        self._abandoned = ""  # why the driver ended the ranks, if it did
        self._interrupts = self._forwarded_interrupts = 0
        self._log(connection.describe())

    # ---- console ------------------------------------------------------------------------------------------------

    def _log(self, text: str) -> None:
        print(f"ray: {text}", flush=True)
        with (self._logs / "cluster.log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._state.add_event.remote(text)

    def interrupt(self, number: signal.Signals, count: int) -> None:
        """Record a signal; the next poll forwards it to the ranks."""
        self._interrupts = count

    # ---- the run ------------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Train until the run ends; restarts all ranks when one is lost, up to cluster.max_restarts times."""
        max_restarts = self._config.cluster.max_restarts
        try:
            for restarts in range(max_restarts + 1):
                outcomes = self._train_once(restarts)
                lost = self._abandoned or _lost(outcomes)
                if lost is None or self._engines.error:
                    return _status(outcomes, self._engines.error)
                if restarts == max_restarts or self._interrupts:
                    break
                self._log(f"{lost}; restarting all ranks from the newest checkpoint ({restarts + 1} of {max_restarts})")
                self._config = self._config.model_copy(update={"resume": True})
                self._release_trainer()
            raise ClusterError(
                f"{lost}; not restarting the trainer",
                found=f"{restarts} of {max_restarts} restarts (cluster.max_restarts); logs in {self._logs}",
                remedy="The same command resumes from the newest checkpoint",
            )
        finally:
            self._engines.close()

    def _train_once(self, restarts: int) -> dict[int, Outcome | Lost]:
        """Place the trainer, start its ranks, and return how they have ended."""
        from ray.exceptions import RayActorError

        self._reserve(is_restart=restarts > 0)
        trainer = TrainerGroup(self._layout, self._trainer_bundles)
        try:
            self._start(trainer, restarts)
            return self._supervise(trainer)
        except RayActorError as error:
            return {0: Lost(f"before it started: {one_line(error)}")}
        finally:
            trainer.kill()
            self._poll()

    def _start(self, trainer: TrainerGroup, restarts: int) -> None:
        self._placements = trainer.placements()
        ranks = ", ".join(f"rank {rank} on {placement.address}" for rank, placement in enumerate(self._placements))
        pids = trainer.start(
            self._placements,
            os.getcwd(),
            self._environment,
            lambda rank: str(self._logs / f"rank-{rank}.log"),
            restarts,
            (self._entry, self._config, self._state),
        )
        self._log(f"{ranks}; processes {', '.join(map(str, pids))}; logs: {self._logs}")

    def _supervise(self, trainer: TrainerGroup) -> dict[int, Outcome | Lost]:
        """Poll until all ranks have ended, or until the grace period after the first failure is over.

        Ranks whose colocated engine is lost are abandoned, unless they fail by themselves first.
        """
        outcomes: dict[int, Outcome | Lost] = {}
        deadline, self._abandoned = float("inf"), ""
        while trainer.is_running and time.monotonic() < deadline:
            outcomes |= trainer.ended(self._poll_interval_s)
            if deadline == float("inf") and any(_has_failed(outcome) for outcome in outcomes.values()):
                deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
            self._poll()
            if self._engines.lost:
                deadline = min(deadline, time.monotonic() + LOST_DELAY_S)
        if trainer.is_running and not any(_has_failed(outcome) for outcome in outcomes.values()):
            self._abandoned = self._engines.lost
        return outcomes

    @property
    def _poll_interval_s(self) -> float:
        is_idle = bool(self._published.urls) and not self._published.starting
        return IDLE_POLL_S if is_idle or not self._config.cluster.starts_engines else POLL_S

    def _poll(self) -> None:
        """Print rank 0's new output, forward interrupts, and reconcile the engines."""
        import ray

        view: DriverView = ray.get(self._state.view.remote())
        if view.output:
            sys.stdout.write(view.output.decode(errors="replace"))
            sys.stdout.flush()
        if self._interrupts > self._forwarded_interrupts:
            self._forwarded_interrupts = self._interrupts
            self._state.interrupt.remote()
        self._engines.reconcile(view.request, view.desired_engines, view.scalings)
        self._publish()

    def _publish(self) -> None:
        """Send rank 0 the list of engines if it has changed."""
        import ray

        if self._engines.engines != self._published:
            self._published = self._engines.engines
            ray.get(self._state.set_engines.remote(self._published))

    # ---- placement ----------------------------------------------------------------------------------------------

    def _reserve(self, *, is_restart: bool) -> None:
        """Reserve resources for trainer and engines; raise if the cluster does not have them.

        A restart settles for fewer trainer nodes where the parallel layout allows that.
        """
        import ray
        from ray.util import placement_group, remove_placement_group

        cluster, timeout_s = self._config.cluster, self._config.cluster.node_timeout_s
        if not is_restart:
            self._log(_placement(self._layout))
            wait_for_capacity(self._layout, timeout_s, self._log)
        for nodes in range(self._layout.nodes if is_restart else cluster.trainer_nodes, 0, -1):
            if not is_possible(self._config, nodes):
                continue
            layout = plan_resources(self._config, ray.cluster_resources(), nodes)
            strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
            group = placement_group([layout.trainer] * nodes, strategy=strategy)
            if group.wait(timeout_seconds=timeout_s):
                if nodes < self._layout.nodes:
                    ranks = nodes * layout.ranks_per_node
                    self._log(
                        f"{nodes} of {self._layout.nodes} trainer nodes left; continuing with {counted(ranks, 'rank')}"
                    )
                self._trainer_bundles, self._layout, self._engines.layout = group, layout, layout
                self._reserve_engines(timeout_s)
                return
            remove_placement_group(group)
            if not is_restart:
                break
        raise ClusterError(
            f"no resources for the trainer became free within {timeout_s:g} s (cluster.node_timeout_s)",
            expected=f"{self._layout.nodes} nodes with {_resources(self._layout.trainer)} each",
            found=_resources(ray.available_resources()),
            remedy="Add machines, or lower cluster.trainer_nodes or cluster.ranks_per_node",
        )

    def _reserve_engines(self, timeout_s: float) -> None:
        import ray

        if self._layout.colocated:
            return
        groups = self._engines.reserve(self._layout.engines)
        for group in groups:
            if not group.wait(timeout_seconds=timeout_s):
                raise ClusterError(
                    f"no resources for the engines became free within {timeout_s:g} s (cluster.node_timeout_s)",
                    expected=f"{len(groups)} times {_resources(self._layout.engine)} next to the trainer",
                    found=_resources(ray.available_resources()),
                    remedy="Add machines, lower cluster.engines, or set cluster.placement = colocated",
                )

    def _release_trainer(self) -> None:
        from ray.util import remove_placement_group

        if self._layout.colocated:
            self._engines.reset()
            self._publish()
        remove_placement_group(self._trainer_bundles)

    def _place_engine(self, index: int) -> EnginePlacement:
        """Reserve a bundle for an engine; a colocated engine uses the bundle of its trainer node."""
        from ray.util import placement_group

        layout = self._layout
        if not layout.colocated:
            return EnginePlacement(placement_group([layout.engine], strategy="STRICT_PACK"), 0, {})
        node = index // (layout.engines // layout.nodes)
        devices = engine_devices(self._config, self._placements, layout, index)
        return EnginePlacement(self._trainer_bundles, node, devices)


def _on_this_node() -> Any:
    """Return the strategy that ties an actor to the driver's node, so that it ends with the driver."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _placement(layout: Layout) -> str:
    ranks = counted(layout.nodes * layout.ranks_per_node, "rank")
    trainer = f"{ranks} on {counted(layout.nodes, 'node')} with {_resources(layout.trainer)} each"
    if not layout.engines:
        return f"placing {trainer}"
    where = "on the same nodes" if layout.colocated else f"with {_resources(layout.engine)} each"
    return f"placing {trainer}; {counted(layout.engines, 'engine')} {where}"


def _resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if name in ("CPU", "GPU", "NPU"))


# ---- outcomes of ranks -----------------------------------------------------------------------------------------------


def _has_failed(outcome: Outcome | Lost) -> bool:
    return isinstance(outcome, Lost) or outcome.status not in (ExitStatus.OK, ExitStatus.INTERRUPTED)


def _lost(outcomes: Mapping[int, Outcome | Lost]) -> str | None:
    """Name the lost ranks or engines if they ended the run; None if it failed with its own error."""
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Outcome) and outcome.error]
    causes = {rank: outcome.cause for rank, outcome in outcomes.items() if isinstance(outcome, Lost)}
    engine_error = next((outcome.error for outcome in errors if outcome.is_engine_error), None)
    is_own_error = any(not outcome.is_secondary and not outcome.is_engine_error for outcome in errors)
    if is_own_error or not (causes or engine_error):
        return None
    if not causes:
        return f"rank 0 was left without engines ({engine_error})"
    ranks = f"rank{'s' * (len(causes) > 1)} {', '.join(map(str, sorted(causes)))}"
    return f"{ranks} {'were' if len(causes) > 1 else 'was'} lost ({causes[min(causes)]})"


def _status(outcomes: Mapping[int, Outcome | Lost], engine_error: str = "") -> int:
    """Return the run's exit status; raise the first primary error.

    engine_error   why the driver starts no more engines: then lost ranks are not restarted either
    """
    failed = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Outcome) and outcome.error}
    if failed:
        rank = min(failed, key=lambda rank: (failed[rank].is_secondary, rank))
        outcome = failed[rank]
        is_common = len(outcomes) == 1 or outcome.on_all_ranks
        raise ClusterError(outcome.error if is_common else f"rank {rank}: {outcome.error}", status=outcome.status)
    if lost := _lost(outcomes):
        raise ClusterError(f"{lost}; not restarting the trainer", found=engine_error or None)
    statuses = {outcome.status for outcome in outcomes.values() if isinstance(outcome, Outcome)}
    return ExitStatus.INTERRUPTED if ExitStatus.INTERRUPTED in statuses else max(statuses, default=0)
