"""The actor of one trainer rank: the process that torchrun would have started."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from moe_replay.cluster.layout import Place
from moe_replay.cluster.output import DriverLink, write_to
from moe_replay.errors import EngineUnavailableError, MoeReplayError


class Outcome(NamedTuple):
    """Outcome of a rank that has ended.

    error       text of its error; empty if it has none
    is_told     the error is raised on every rank
    is_other    the error is only that another rank was lost, or has failed
    is_engine   the engines that the cluster has started do not answer
    """

    status: int
    error: str = ""
    is_told: bool = False
    is_other: bool = False
    is_engine: bool = False


class RankActor:
    """One rank; Ray runs its methods one after the other in the main thread."""

    def place(self, accelerator: str | None) -> Place:
        """Return where this actor is."""
        import ray

        context = ray.get_runtime_context()
        devices = context.get_accelerator_ids().get(accelerator, []) if accelerator else []
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return Place(context.get_node_id(), address, tuple(map(str, devices)), probe.getsockname()[1])

    def prepare(self, folder: str, environment: Mapping[str, str], log: str) -> int:
        """Take over environment and working directory, before anything is imported; returns the process id."""
        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as with `python -m`
        self._log = Path(log)
        self._start = write_to(self._log)
        return os.getpid()

    def run(self, entry: Callable[..., None], config: Any, board: Any) -> Outcome:
        """Train on this rank.

        entry   called with the config and, on rank 0, what starts the engines: the same on ranks of torchrun
        board   the run's `RunBoard`, on rank 0; None on the others
        """
        from moe_replay.cluster.servers import RayEngines
        from moe_replay.distributed.rank_watch import RankLostError
        from moe_replay.distributed.ranks import OtherRankError

        try:
            with ExitStack() as stack:
                if board is not None:
                    stack.enter_context(DriverLink(board, self._log, self._start))
                entry(config, RayEngines(board) if board is not None and config.cluster.starts_engines else None)
        except MoeReplayError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            is_other = isinstance(error, (RankLostError, OtherRankError))
            is_engine = isinstance(error, EngineUnavailableError) and config.cluster.starts_engines
            return Outcome(int(error.exit_status), str(error), error.known_on_all_ranks, is_other, is_engine)
        except SystemExit as ended:
            return Outcome(ended.code if isinstance(ended.code, int) else int(bool(ended.code)))
        return Outcome(0)
