"""The actor of one rollout engine: it starts the server that `moe-replay rollout` would start, and watches it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_replay.cluster.output import write_to
from moe_replay.errors import MoeReplayError


class StartedEngine(NamedTuple):
    """An engine that is ready: its address and process; or the error that ended it."""

    url: str = ""
    pid: int = 0
    error: str = ""


class EngineActor:
    """One engine; Ray runs its methods one after the other in the main thread, whose end is also the engine's."""

    def __init__(self) -> None:
        self._processes: Any = None

    def start(
        self, engine: str, request: Mapping[str, Any], token: str, folder: str, environment: Mapping[str, str], log: str
    ) -> StartedEngine:
        """Start the engine and wait until it is ready.

        request       fields of its `StartRequest`
        folder        working directory of the driver
        environment   its variables, and the devices of the engine
        """
        import ray

        os.environ.update(environment)
        if os.path.isdir(folder):
            os.chdir(folder)
        if os.getcwd() not in sys.path:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        start = write_to(Path(log))
        from moe_replay.rollout.engine import StartRequest
        from moe_replay.rollout.server.engine_processes import EngineProcesses

        address = ray.util.get_node_ip_address()
        try:
            self._processes = EngineProcesses(
                engine, StartRequest.from_fields(request), 1, token=token, host=address, shares=[None]
            )
        except MoeReplayError as error:
            return StartedEngine(error=f"{error}{_last_line(Path(log), start)}")
        (port,), (pid,) = self._processes.ports, self._processes.pids
        return StartedEngine(f"http://{address}:{port}", pid)

    def wait(self, seconds: float) -> int | None:
        """Return the engine's exit status; None if it has not ended within `seconds`."""
        return self._processes.wait(seconds)

    def close(self) -> None:
        """Shut the engine down cleanly."""
        if self._processes is not None:
            self._processes.close()


def _last_line(log: Path, start: int) -> str:
    """Return the last line that was written since `start`, to be quoted."""
    with log.open("rb") as written:
        written.seek(start)
        lines = written.read().decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f" ({last.strip()[:500]})" if last else ""
