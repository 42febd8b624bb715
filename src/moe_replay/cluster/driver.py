"""`run_on_ray`: the driver of a run on a Ray cluster. It places ranks and engines, and starts again what is lost.

The ranks train as those of torchrun do, by the same function; nothing of a step is known here.
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

from moe_replay.cluster.board import NAMESPACE, DriverView, EngineList, RunBoard, board_name
from moe_replay.cluster.engine_group import LOST_S, EngineGroup, Spot
from moe_replay.cluster.layout import Layout, Place, engine_devices, is_possible, plan_resources
from moe_replay.cluster.rank_actor import Outcome
from moe_replay.cluster.room import wait_for_room
from moe_replay.cluster.session import ClusterError, Session, connected
from moe_replay.cluster.trainer_group import SETTLE_S, Lost, TrainerGroup
from moe_replay.errors import ExitStatus
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.run.location import run_folder
from moe_replay.utils.messages import one_line
from moe_replay.utils.signals import EndSignals

POLL_S, CALM_S = 0.3, 1.0
"""Seconds between looks at the run, while engines are being started and once they are ready."""
FORWARDED = (
    "CUBLAS_", "DATASETS_", "GLOO_", "HF_", "HUGGING_FACE_", "MKL_", "MLFLOW_", "MOE_REPLAY_", "NCCL_", "OMP_",
    "PYTORCH_", "TENSORBOARD_", "TOKENIZERS_", "TORCH_", "TQDM_", "TRANSFORMERS_", "VLLM_", "WANDB_",
)  # fmt: skip
"""Variables of the driver that ranks and engines get begin so; the rest of their environment is their machine's."""


def run_on_ray(config: TrainConfig, entry: Callable[..., None]) -> int:
    """Train on a Ray cluster and return the exit status; raise if the run fails.

    entry   trains on a rank: called there with the config and, on rank 0, with what starts the engines
    """
    if "RANK" in os.environ:
        raise ConfigError(
            'cluster.kind = "ray" starts its ranks itself, and torchrun has started this one',
            remedy="Start the command once, without torchrun, or set cluster.kind = torchrun",
        )
    folder = run_folder(config)
    config = config.model_copy(update={"output": folder})
    with connected(config) as session:
        run = RayRun(config, entry, session, folder)
        with EndSignals(run.interrupt, end_after=2, farewell="ended without saving; the run resumes from its newest "
                        "checkpoint"):  # fmt: skip
            return run.train()


class RayRun:
    """One run: its board, its engines, and one start of the trainer after the other."""

    def __init__(self, config: TrainConfig, entry: Callable[..., None], session: Session, folder: Path) -> None:
        import ray

        self._config, self._entry, self._folder = config, entry, folder
        self._logs = folder / "logs"
        self._logs.mkdir(exist_ok=True)
        self._environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        token = secrets.token_urlsafe(32)
        self._layout = plan_resources(config, ray.cluster_resources())
        remote: Any = ray.remote(RunBoard)
        self._board = remote.options(
            name=board_name(folder.name), namespace=NAMESPACE, num_cpus=0, scheduling_strategy=_here()
        ).remote(config.cluster.engines or 0, token, not self._layout.colocated, self._layout.engine)
        self._group: Any = None  # of the trainer
        self._places: list[Place] = []
        self._engines = self._engine_group(token)
        self._published = EngineList()
        self._given_up = ""  # why the ranks were ended, if the driver did
        self._interrupts = self._passed_on = 0
        self._tell(f"{session.describe()}")

    # ---- what the user sees -------------------------------------------------------------------------------------

    def _tell(self, text: str) -> None:
        line = f"ray: {text}"
        print(line, flush=True)
        with (self._logs / "cluster.log").open("a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        self._board.event.remote(text)

    def interrupt(self, number: signal.Signals, count: int) -> None:
        """Pass a signal on to the ranks at the next opportunity."""
        self._interrupts = count

    # ---- the run ------------------------------------------------------------------------------------------------

    def train(self) -> int:
        """Train until the run has ended; start the ranks again when one is lost, as often as is allowed."""
        most = self._config.cluster.max_restarts
        try:
            for restarts in range(most + 1):
                ended = self._train_once(restarts)
                lost = None if self._engines.error else self._given_up or _lost(ended)
                if lost is None:
                    return _status(ended)
                if restarts == most or self._interrupts:
                    break
                self._tell(f"{lost}: all ranks start again from the newest checkpoint ({restarts + 1} of {most})")
                self._config = self._config.model_copy(update={"resume": True})
                self._release_trainer()
            raise ClusterError(
                f"{lost}; the trainer is not started again",
                found=f"{restarts} of {most} restarts (cluster.max_restarts); logs in {self._logs}",
                remedy="The same command resumes from the newest checkpoint",
            )
        finally:
            self._engines.close()

    def _train_once(self, restarts: int) -> dict[int, Outcome | Lost]:
        """Place the trainer, start its ranks, and return how they have ended."""
        from ray.exceptions import RayActorError

        self._place(restarts > 0)
        trainer = TrainerGroup(self._layout, self._group)
        try:
            self._start(trainer, restarts)
            return self._supervise(trainer)
        except RayActorError as error:
            return {0: Lost(f"before it was started: {one_line(error)}")}
        finally:
            trainer.kill()
            self._look()

    def _start(self, trainer: TrainerGroup, restarts: int) -> None:
        """Start the ranks of a trainer that has been placed."""
        self._places = trainer.place()
        where = ", ".join(f"rank {number} on {place.address}" for number, place in enumerate(self._places))
        pids = trainer.start(
            self._places,
            os.getcwd(),
            self._environment,
            lambda number: str(self._logs / f"rank-{number}.log"),
            restarts,
            (self._entry, self._config, self._board),
        )
        self._tell(f"{where}; processes {', '.join(map(str, pids))}; logs: {self._logs}")

    def _supervise(self, trainer: TrainerGroup) -> dict[int, Outcome | Lost]:
        """Look after everything until all ranks have ended, or one has failed and the others had time to end.

        Ranks whose devices an engine has left without notice are given up, unless they have failed.
        """
        ended: dict[int, Outcome | Lost] = {}
        deadline, self._given_up = float("inf"), ""
        while trainer.is_running and time.monotonic() < deadline:
            ended |= trainer.ended(self._pause_s)
            if deadline == float("inf") and any(_has_failed(one) for one in ended.values()):
                deadline = time.monotonic() + SETTLE_S
            self._look()
            if self._engines.lost:
                deadline = min(deadline, time.monotonic() + LOST_S)
        if trainer.is_running and not any(_has_failed(one) for one in ended.values()):
            self._given_up = self._engines.lost
        return ended

    @property
    def _pause_s(self) -> float:
        is_calm = bool(self._published.urls) and not self._published.starting
        return CALM_S if is_calm or not self._config.cluster.starts_engines else POLL_S

    def _look(self) -> None:
        """Show new output of rank 0, pass signals on, and look after the engines."""
        import ray

        view: DriverView = ray.get(self._board.view.remote())
        if view.output:
            sys.stdout.write(view.output.decode(errors="replace"))
            sys.stdout.flush()
        if self._interrupts > self._passed_on:
            self._passed_on = self._interrupts
            self._board.interrupt.remote()
        self._engines.tend(view.order, view.wanted)
        self._publish()

    def _publish(self) -> None:
        """Tell rank 0 which engines there are."""
        import ray

        if self._engines.engines != self._published:
            self._published = self._engines.engines
            ray.get(self._board.set_engines.remote(self._published))

    # ---- placement ----------------------------------------------------------------------------------------------

    def _place(self, again: bool) -> None:
        """Reserve the resources of the trainer and of the engines; raise if the cluster does not have them."""
        import ray
        from ray.util import placement_group, remove_placement_group

        cluster, limit_s = self._config.cluster, self._config.cluster.node_timeout_s
        if not again:
            self._tell(_placement(self._layout))
            wait_for_room(self._layout, limit_s, self._tell)
        for nodes in range(self._layout.nodes if again else cluster.trainer_nodes, 0, -1):
            if not is_possible(self._config, nodes):
                continue
            layout = plan_resources(self._config, ray.cluster_resources(), nodes)
            strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
            group = placement_group([layout.trainer] * nodes, strategy=strategy)
            if _is_ready(group, limit_s):
                if nodes < self._layout.nodes:
                    ranks = nodes * layout.ranks_per_node
                    left = f"{nodes} of {self._layout.nodes} machines of the trainer are left"
                    self._tell(f"{left}: {ranks} rank{'s' * (ranks > 1)}")
                self._group, self._layout, self._engines.layout = group, layout, layout
                self._reserve_engines(limit_s)
                return
            remove_placement_group(group)
            if not again:
                break
        raise ClusterError(
            f"the cluster cannot hold the trainer: nothing was free for {limit_s:g} s (cluster.node_timeout_s)",
            expected=f"{self._layout.nodes} machines with {_resources(self._layout.trainer)} each",
            found=_resources(ray.available_resources()),
            remedy="Add machines, or lower cluster.trainer_nodes or cluster.ranks_per_node",
        )

    def _reserve_engines(self, limit_s: float) -> None:
        import ray

        if self._layout.colocated:
            return
        for group in self._engines.reserve(self._layout.engines):
            if not _is_ready(group, limit_s):
                raise ClusterError(
                    f"the cluster cannot hold the engines: nothing was free for {limit_s:g} s (cluster.node_timeout_s)",
                    expected=f"{self._layout.engines} times {_resources(self._layout.engine)} beside the trainer",
                    found=_resources(ray.available_resources()),
                    remedy="Add machines, lower cluster.engines, or set cluster.placement = colocated",
                )

    def _release_trainer(self) -> None:
        from ray.util import remove_placement_group

        if self._layout.colocated:
            self._engines.reset()
            self._publish()
        remove_placement_group(self._group)

    def _engine_group(self, token: str) -> EngineGroup:
        return EngineGroup(
            self._layout,
            self._config.cluster.max_restarts,
            (token, os.getcwd(), self._environment),
            lambda number: str(self._logs / f"engine-{number}.log"),
            self._engine_spot,
            self._tell,
        )

    def _engine_spot(self, number: int) -> Spot:
        """Return the placement of an engine: its own resources, or a share of those of a machine of the trainer."""
        from ray.util import placement_group

        layout = self._layout
        if not layout.colocated:
            return Spot(placement_group([layout.engine], strategy="STRICT_PACK"), 0, {})
        node = number // (layout.engines // layout.nodes)
        return Spot(self._group, node, engine_devices(self._config, self._places, layout, number))


def _here() -> Any:
    """Return the strategy that keeps an actor on the driver's machine, with which it ends."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _is_ready(group: Any, limit_s: float) -> bool:
    return group.wait(timeout_seconds=limit_s)


def _placement(layout: Layout) -> str:
    ranks = layout.nodes * layout.ranks_per_node
    machines = f"{layout.nodes} machine{'s' * (layout.nodes > 1)}"
    trainer = f"{ranks} rank{'s' * (ranks > 1)} on {machines}, each with {_resources(layout.trainer)}"
    if not layout.engines:
        return f"placing {trainer}"
    where = "on the same machines" if layout.colocated else f"with {_resources(layout.engine)} each"
    return f"placing {trainer}; {layout.engines} engine{'s' * (layout.engines > 1)} {where}"


def _resources(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{number:g} {name}" for name, number in resources.items() if name in ("CPU", "GPU", "NPU"))


# ---- how ranks have ended --------------------------------------------------------------------------------------------


def _has_failed(one: Outcome | Lost) -> bool:
    return isinstance(one, Lost) or one.status not in (ExitStatus.OK, ExitStatus.INTERRUPTED)


def _lost(ended: Mapping[int, Outcome | Lost]) -> str | None:
    """Say which ranks or engines were lost, if that is why the run has ended; None if it failed with its own error."""
    errors = [one for one in ended.values() if isinstance(one, Outcome) and one.error]
    gone = {number: one.cause for number, one in ended.items() if isinstance(one, Lost)}
    without_engines = next((one.error for one in errors if one.is_engine), None)
    if any(not one.is_other and not one.is_engine for one in errors) or not (gone or without_engines):
        return None
    if not gone:
        return f"rank 0 was left without engines ({without_engines})"
    names = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, sorted(gone)))}"
    return f"{names} {'were' if len(gone) > 1 else 'was'} lost ({gone[min(gone)]})"


def _status(ended: Mapping[int, Outcome | Lost]) -> int:
    """Return the exit status of ranks that have ended by themselves; raise the error that a user is to see."""
    failed = {number: one for number, one in sorted(ended.items()) if isinstance(one, Outcome) and one.error}
    if failed:
        number = min(failed, key=lambda rank: (failed[rank].is_other, rank))
        one = failed[number]
        text = one.error if len(ended) == 1 or one.is_told else f"rank {number}: {one.error}"
        raise ClusterError(text, status=one.status)
    statuses = {one.status for one in ended.values() if isinstance(one, Outcome)}
    return ExitStatus.INTERRUPTED if ExitStatus.INTERRUPTED in statuses else max(statuses, default=0)
