"""Engine processes as forks of the server of ranks: six seconds of CPU less for each.

That they are started as programs, and end with the process that started them: test_engine_processes.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from moe_replay.engines.server import engine_processes
from tests.faults.forked import Forked


class ForkedEngine(Forked):
    """What `EngineProcesses` asks of a process that it has started."""

    def __init__(self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], env: dict[str, str]) -> None:
        assert list(command)[1:] == ["-m", "moe_replay.engines.server.engine_processes"]
        (ready,) = pass_fds
        super().__init__(_serve, Connection(os.dup(ready), readable=False), ready, environment=env)
        self.stdin: Any = self.stdin.detach()  # bytes

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(timeout or 600.0)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _serve(pipe: Connection, number: int) -> None:
    os.dup2(pipe.fileno(), number)
    pipe.close()
    with patch.object(engine_processes, "end_with_parent"):  # its parent is the server of ranks
        engine_processes.main()


@pytest.fixture
def forked_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork what `EngineProcesses` starts."""
    names = SimpleNamespace(Popen=ForkedEngine, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(engine_processes, "subprocess", names)
