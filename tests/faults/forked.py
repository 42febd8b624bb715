"""Programs and commands in forks of the server of ranks, which has imported the trainer: seconds of CPU less for each.

What is asked of them is what `subprocess.Popen` offers. A fork leaves without running what is registered with `atexit`.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, popen_forkserver, process, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch

from tests.distributed.harness import fork_server, preloaded
from tests.real_vllm.forks import NEEDED

ROOT = Path(__file__).parents[2]


@functools.cache
def _server_with_vllm() -> forkserver.ForkServer:
    """A second server, which has imported vLLM too: ten seconds of CPU for each process that would import it."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(preloaded(*NEEDED))
    with patch.dict(os.environ, VLLM_LOGGING_LEVEL="ERROR"):  # read when vLLM is imported
        server.ensure_running()
    return server


class _PopenWithVllm(popen_forkserver.Popen):
    def _launch(self, process_obj: process.BaseProcess) -> None:
        with patch.object(forkserver, "connect_to_new_process", _server_with_vllm().connect_to_new_process):
            super()._launch(process_obj)


class _ProcessWithVllm(ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> _PopenWithVllm:  # noqa: N802
        return _PopenWithVllm(process_obj)


class _ContextWithVllm(ForkServerContext):
    Process = _ProcessWithVllm


class Forked:
    """A function in a process and a process group of its own; its output and errors are one pipe, its input another."""

    def __init__(
        self, function: Callable[..., None], *arguments: Any, environment: dict[str, str], with_vllm: bool = False
    ) -> None:
        context = _ContextWithVllm() if with_vllm else fork_server()
        output, written = context.Pipe(duplex=False)
        read, given = context.Pipe(duplex=False)
        pipes = (read, written)
        everything = dict(os.environ) | environment  # the server has that of the test that started it
        self._process = context.Process(target=_in_fork, args=(pipes, everything, function, arguments))
        self._process.start()
        for used in pipes:
            used.close()
        self.stdout = os.fdopen(_taken(output))
        self.stdin = os.fdopen(_taken(given), "w")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([str(self._process)], timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Close its input, and read until everything that writes to its output has ended."""
        self.stdin.close()
        text = self.stdout.read()
        self.wait(timeout)
        return text, None

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stdin.close()
        self.stdout.close()
        if kind is not None:
            self.kill()
        self._process.join()


def fork_command(*words: str, environment: dict[str, str] | None = None) -> Forked:
    """Run `moe-replay`."""
    return Forked(_command, words, environment=environment or {})


def fork_with_vllm(*words: str, environment: dict[str, str] | None = None) -> Forked:
    """Run `moe-replay` with vLLM's processes as forks of its own."""
    return Forked(_command_with_vllm, words, environment=environment or {}, with_vllm=True)


def fork_ranks_with_vllm(*words: str, environment: dict[str, str] | None = None) -> Forked:
    """Run `moe-replay` on two ranks below an agent of torchrun, all of them forks, as `fork_with_vllm` does."""
    return Forked(_agent, words, environment=environment or {}, with_vllm=True)


def fork_python(code: str, *arguments: str, environment: dict[str, str] | None = None) -> Forked:
    """Run a program."""
    return Forked(_program, code, arguments, environment=environment or {})


def _taken(connection: Connection) -> int:
    """The file descriptor of a connection, which is closed."""
    number = os.dup(connection.fileno())
    connection.close()
    return number


def _in_fork(
    pipes: Sequence[Connection], environment: dict[str, str], function: Callable[..., None], arguments: Any
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    given, written = pipes
    os.dup2(given.fileno(), 0)
    os.dup2(written.fileno(), 1)
    os.dup2(written.fileno(), 2)
    for pipe in pipes:
        pipe.close()
    sys.stdin = os.fdopen(0)  # that of the server is closed
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # that of the server lives on, and with it what it is to remove
    torch.set_num_threads(1)
    function(*arguments)


def _command(words: Sequence[str]) -> None:
    from moe_replay.cli.main import main

    sys.argv[:] = ["moe-replay", *words]
    main()


def _command_with_vllm(words: Sequence[str]) -> None:
    from tests.real_vllm.forks import forked_engines

    with forked_engines():
        _command(words)


def _agent(words: Sequence[str]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ranks: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "start_method": "fork"}
    place: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
    elastic_launch(LaunchConfig(**ranks, **place, max_restarts=0, monitor_interval=0.1), _rank)(words)


def _rank(words: Sequence[str]) -> None:
    Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")  # for `rank_process`
    _command_with_vllm(words)


def _program(code: str, arguments: Sequence[str]) -> None:
    sys.argv[:] = ["-c", *arguments]
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        runpy.run_path(file.name, run_name="__main__")
