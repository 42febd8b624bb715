"""Engines in separate processes on this machine, each on a part of its devices, reached over HTTP.

A trainer starts them, and they end with it, however it ends. The first line of a process's standard input says what to
serve, token included; when its engine is ready it writes its port to the pipe that it was given. Nothing here imports
torch before it is needed: a process that only starts engines and watches them does without.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from moe_replay.engines.base import Engine, StartRequest, devices_per_engine
from moe_replay.errors import EngineError, EngineOptionError, EngineUnavailableError
from moe_replay.utils.misc import VISIBLE_DEVICES
from moe_replay.utils.processes import end_with_parent, leave_process_group

MAX_REQUESTS = 2**20  # the trainer is the only client
TIMEOUT_S = 24 * 3600.0
SHUTDOWN_TIMEOUT_S = 30.0
POLL_S = 0.1


def device_shares(engines: int, options: Mapping[str, Any]) -> list[str | None]:
    """Return the devices of each engine as CUDA_VISIBLE_DEVICES, or its like, names them; None on CPUs.

    Every engine gets as many of those that this process sees, in order; they must be as many as the engine uses.
    """
    import torch

    from moe_replay.utils import device

    variable = VISIBLE_DEVICES.get(device.accelerator() or "cpu")
    if variable is None:
        return [None] * engines
    visible = os.environ.get(variable)
    devices = visible.split(",") if visible else [str(index) for index in range(torch.accelerator.device_count())]
    per_engine = len(devices) // engines
    used = devices_per_engine(options)
    if per_engine * engines != len(devices) or per_engine != used:
        raise EngineOptionError(
            "the engines do not share the devices of this machine evenly",
            expected=f"rollout.engines_per_node = {len(devices) // used or 1} engines of {used} GPUs each"
            if len(devices) % used == 0
            else f"engines x GPUs of each = {len(devices)}",
            found=f"{engines} engines of {used} GPUs each",
            remedy="An engine has tensor_parallel_size x data_parallel_size x pipeline_parallel_size GPUs "
            "(rollout.options)",
        )
    return [",".join(devices[start : start + per_engine]) for start in range(0, len(devices), per_engine)]


def _visible(devices: str | None) -> dict[str, str]:
    """Return the variable that shows a process these devices alone; nothing for None."""
    if devices is None:
        return {}
    from moe_replay.utils import device

    return {VISIBLE_DEVICES[device.accelerator() or "cpu"]: devices}


class EngineProcesses:
    """Engines that this process has started, by their ports; `close` ends them.

    engine    name of the engine, of those that run in a process ("vllm", "transformers", "module:name")
    request   what each is started with
    host      address that they listen on
    shares    devices of each, as CUDA_VISIBLE_DEVICES names them, None: all that this process sees; left out: this
              machine's are divided among them
    """

    def __init__(
        self,
        engine: str,
        request: StartRequest,
        count: int,
        *,
        token: str,
        host: str = "127.0.0.1",
        shares: Sequence[str | None] | None = None,
    ) -> None:
        self.ports: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        shares = device_shares(count, request.options) if shares is None else shares
        with ExitStack() as undo:
            undo.callback(self.close)
            pipes = [self._start(engine, request, token, host, devices) for devices in shares]
            self.ports = [self._port(number, pipe) for number, pipe in enumerate(pipes)]
            undo.pop_all()

    def _start(self, engine: str, request: StartRequest, token: str, host: str, devices: str | None) -> int:
        reader, writer = os.pipe()
        settings: dict[str, Any] = {
            "engine": engine,
            "token": token,
            "host": host,
            "parent": os.getpid(),
            "ready": writer,
        }
        settings["request"] = dataclasses.asdict(request) | {"token": None}
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_replay.engines.server.engine_processes"],
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            env=os.environ | _visible(devices),
        )
        os.close(writer)
        self._processes.append(process)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(json.dumps(settings).encode() + b"\n")
        return reader

    def _port(self, number: int, pipe: int) -> int:
        """Wait for an engine and return its port; the pipe closes when its process ends."""
        with os.fdopen(pipe, "rb") as lines:
            line = lines.readline()
        if not line:
            raise EngineUnavailableError(
                f"engine {number} of this machine did not start",
                found=f"its process ended with status {self._processes[number].wait()}",
                remedy="Its log above names the cause",
            )
        return int(line)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait(self, seconds: float) -> int | None:
        """Return the status of an engine that has ended; None if none has within `seconds`."""
        end = time.monotonic() + seconds
        while True:
            ended = [process.poll() for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() >= end:
                return next(iter(ended), None)
            time.sleep(POLL_S)

    def close(self) -> None:
        """End all engines in order; those that do not end are killed."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(SHUTDOWN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def connect_local(
    urls: Sequence[str], token: str, vocab_size: int | None, follow: Callable[[], Sequence[str]] | None = None
) -> Engine:
    """Return the engines at these addresses, which this run has started, as one.

    follow   returns their addresses from now on, where engines may join and leave (`EnginePool.follow`)
    """
    from moe_replay.engines.pool import EnginePool
    from moe_replay.engines.server.client import RolloutClient

    def client(url: str) -> RolloutClient:
        return RolloutClient(url, token=token, vocab_size=vocab_size, timeout=TIMEOUT_S, max_concurrent=MAX_REQUESTS)

    # One that was lost a moment ago may still be listed.
    pool = EnginePool([client(url) for url in urls], any_version=True, min_servers=None if follow is None else 1)
    if follow is not None:
        pool.follow(follow, client)
    return pool


def _serve() -> None:
    """Serve the engine that the first line of standard input describes, until a signal."""
    from moe_replay.engines.registry import start_engine
    from moe_replay.engines.requests import RequestLimits
    from moe_replay.engines.server.app import build_app
    from moe_replay.engines.server.serve import Server, listening

    settings = json.loads(sys.stdin.readline())
    leave_process_group()  # Ctrl-C is for the trainer, which ends its engines in order
    end_with_parent(settings["parent"])
    limits = RequestLimits(body_s=TIMEOUT_S, update_s=TIMEOUT_S)
    request = StartRequest.from_fields(settings["request"])
    with listening(settings["host"], 0) as opened:
        opened.listen()  # connections wait until the server accepts them

        def start() -> Engine:
            engine = start_engine(settings["engine"], request)
            with os.fdopen(settings["ready"], "w") as ready:
                ready.write(f"{opened.getsockname()[1]}\n")
            return engine

        Server(opened, limits).run(start, lambda engine: build_app(engine, settings["token"], MAX_REQUESTS, limits))


def main() -> None:
    """Serve an engine; an error of it ends the process with one line."""
    try:
        _serve()
    except EngineError as error:
        raise SystemExit(f"engine process: {error}") from error


if __name__ == "__main__":
    main()
