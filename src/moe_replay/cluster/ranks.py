"""Trainer ranks on Ray: the actor of one rank, in place of a torchrun process, and the group of all ranks."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from moe_replay.cluster.layout import Layout, RankPlacement, actor_options, rank_environments
from moe_replay.cluster.state_actor import EngineList, EngineRequest
from moe_replay.errors import EngineUnavailableError, ExitStatus, MoeReplayError
from moe_replay.utils.misc import one_line

if TYPE_CHECKING:
    from moe_replay.engines.base import StartRequest
    from moe_replay.train.setup.engines import StartedEngines

KILL_TIMEOUT_S = 60.0
SHUTDOWN_TIMEOUT_S = 60.0
"""Seconds that the other ranks get to end after one has failed, before they are killed."""
OUTPUT_POLL_S = 0.3
INTERRUPT_POLL_S = 1.0
"""Seconds between reads of new output, and between actor calls without any: a call costs Ray milliseconds."""
ENGINES_POLL_S = 0.2
CHUNK = 2**16


class Outcome(NamedTuple):
    """Exit status and error of a rank that has ended."""

    status: int
    error: str = ""  # text of its error; empty if there is none
    on_all_ranks: bool = False  # the same error is raised on every rank
    is_secondary: bool = False  # the error only says that another rank failed or was lost
    is_engine_error: bool = False  # the engines that the cluster started do not answer


class Lost(NamedTuple):
    """A rank whose process is gone."""

    cause: str


# ---- in the actor's process ------------------------------------------------------------------------------------------


class RankActor:
    """One rank. Ray runs actor methods in the main thread, one after the other."""

    def placement(self, accelerator: str | None) -> RankPlacement:
        import ray

        context = ray.get_runtime_context()
        devices = context.get_accelerator_ids().get(accelerator, []) if accelerator else []
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return RankPlacement(context.get_node_id(), address, tuple(map(str, devices)), probe.getsockname()[1])

    def prepare(self, folder: str, environment: Mapping[str, str], log: str) -> int:
        """Set the environment and working directory before torch is imported; returns the process id."""
        self._log = Path(log)
        self._log_start = enter(folder, environment, self._log)
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as with `python -m`
        return os.getpid()

    def run(self, entry: Callable[..., None], config: Any, state: Any) -> Outcome:
        """Train on this rank.

        entry   called with the config and, on rank 0, an `EngineStarter`; torchrun ranks call the same function
        state   the `RunState` actor on rank 0, None on the others
        """
        from moe_replay.distributed.rank_watch import RankLostError
        from moe_replay.distributed.ranks import OtherRankError

        try:
            with ExitStack() as stack:
                if state is not None:
                    stack.enter_context(DriverLink(state, self._log, self._log_start))
                entry(config, RayEngines(state) if state is not None and config.cluster.starts_engines else None)
        except MoeReplayError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            is_secondary = isinstance(error, (RankLostError, OtherRankError))
            is_engine_error = isinstance(error, EngineUnavailableError) and config.cluster.starts_engines
            return Outcome(int(error.exit_status), str(error), error.known_on_all_ranks, is_secondary, is_engine_error)
        except SystemExit as exited:
            return Outcome(exited.code if isinstance(exited.code, int) else int(bool(exited.code)))
        return Outcome(0)


def enter(folder: str, environment: Mapping[str, str], log: Path) -> int:
    """Set variables and folder, append stdout and stderr to a file; return the offset at which this output starts."""
    os.environ.update(environment)
    if os.path.isdir(folder):
        os.chdir(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="replace")
    return log.stat().st_size


class DriverLink:
    """Rank 0's link to the driver: forwards console output, and delivers interrupts as SIGTERM.

    state   the `RunState` actor
    start   offset at which this rank's output starts in its log
    """

    def __init__(self, state: Any, log: Path, start: int) -> None:
        self._state = state
        self._log, self._start = log, start
        self._ending = threading.Event()
        self._interrupts = 0
        self._thread = threading.Thread(target=self._run, name="driver link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        from ray import get
        from ray.exceptions import RayError

        called = float("-inf")
        with self._log.open("rb") as output:
            output.seek(self._start)
            while True:
                is_last = self._ending.wait(OUTPUT_POLL_S)
                chunk = output.read(CHUNK)
                try:
                    while chunk or is_last or time.monotonic() >= called + INTERRUPT_POLL_S:
                        self._deliver(get(self._state.push_output.remote(chunk)))
                        called = time.monotonic()
                        if len(chunk) < CHUNK:
                            break
                        chunk = output.read(CHUNK)
                except RayError:  # the driver is gone, and Ray will end this process
                    return
                if is_last:
                    return

    def _deliver(self, interrupts: int) -> None:
        if interrupts > self._interrupts:
            self._interrupts = interrupts
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun forwards a signal


class RayEngines:
    """An `EngineStarter`: requests engines from the driver through the run's `RunState` actor."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def start(self, engine: str, request: StartRequest) -> StartedEngines:
        """Request the engines and wait until all are ready; engines of an earlier start are reused."""
        import ray

        from moe_replay.train.setup.engines import StartedEngines

        fields = dataclasses.asdict(request) | {"token": None}
        token = ray.get(self._state.request_engines.remote(EngineRequest(engine, fields)))
        urls = self._wait_for(lambda engines: bool(engines.urls) and not engines.starting)
        return StartedEngines(urls, token, self.urls)

    def urls(self) -> Sequence[str]:
        """Return the URLs of ready engines; waits while there are none."""
        return self._wait_for(lambda engines: bool(engines.urls))

    def _wait_for(self, is_enough: Callable[[EngineList], bool]) -> tuple[str, ...]:
        import ray

        while True:
            engines: EngineList = ray.get(self._state.engines.remote())
            if engines.error:
                raise EngineUnavailableError(engines.error)
            if is_enough(engines):
                return engines.urls
            time.sleep(ENGINES_POLL_S)


# ---- in the driver ---------------------------------------------------------------------------------------------------


def death_cause(error: BaseException) -> str:
    """Extract from Ray's error why an actor died."""
    text = one_line(error, 2000)
    if "unavailable" in text:
        return "unreachable"
    match = re.search(r"The actor (?:is dead because|died because of) ([^.]*)", text)
    return match[1].strip() if match else one_line(error)


class TrainerGroup:
    """All ranks of one start of the trainer.

    group   placement group with one bundle per trainer node
    """

    def __init__(self, layout: Layout, group: Any) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._layout = layout
        remote: Any = ray.remote(RankActor)
        options = actor_options(layout.rank)
        self._actors: list[Any] = []
        for node in range(layout.nodes):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
            for _ in range(layout.ranks_per_node):
                self._actors.append(remote.options(scheduling_strategy=strategy, **options).remote())
        self._running: dict[Any, int] = {}

    def placements(self) -> list[RankPlacement]:
        """Wait until all actors are placed."""
        import ray

        return ray.get([actor.placement.remote(self._layout.accelerator) for actor in self._actors])

    def start(
        self,
        placements: Sequence[RankPlacement],
        folder: str,
        environment: Mapping[str, str],
        log: Callable[[int], str],
        restarts: int,
        arguments: tuple[Callable[..., None], Any, Any],
    ) -> list[int]:
        """Start training on all ranks; returns their process ids.

        folder      working directory
        arguments   of `RankActor.run`; only rank 0 gets the state actor
        """
        import ray

        variables = rank_environments(placements, self._layout, restarts)
        prepared = [
            actor.prepare.remote(folder, {**environment, **rank_variables}, log(rank))
            for rank, (actor, rank_variables) in enumerate(zip(self._actors, variables, strict=True))
        ]
        pids: list[int] = ray.get(prepared)
        entry, config, state = arguments
        for rank, actor in enumerate(self._actors):
            self._running[actor.run.remote(entry, config, state if rank == 0 else None)] = rank
        return pids

    def ended(self, timeout_s: float) -> dict[int, Outcome | Lost]:
        """Return how ranks have ended since the last call; waits up to `timeout_s` for the first."""
        import ray

        done, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return {self._running.pop(ref): self._outcome(ref) for ref in done}

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def _outcome(self, ref: Any) -> Outcome | Lost:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return ray.get(ref)
        except RayActorError as error:
            return Lost(death_cause(error))
        except RayTaskError as error:
            return Outcome(ExitStatus.FAILED, str(error))

    def kill(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
        if self._running:
            ray.wait(list(self._running), num_returns=len(self._running), timeout=KILL_TIMEOUT_S)
        self._running = {}
