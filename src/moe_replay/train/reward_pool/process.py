"""`RewardProcess`: one process that scores samples, as the trainer's event loop sees it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from moe_replay.train.reward_pool import worker
from moe_replay.train.reward_pool.wire import LENGTH, from_content
from moe_replay.train.rewards import RewardError

START_S = 600.0
"""Seconds in which a process must have imported the functions."""


class RewardLostError(RewardError):
    """The process of a reward has ended, or did not answer in time; it is killed."""


class RewardProcess:
    """A process with these rewards, in its own process group. It belongs to the running event loop.

    It ends when the thread that started it does.

    killed   whether this process has killed it
    """

    def __init__(self, rewards: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            given = {"path": sys.path, "socket": theirs.fileno(), "parent": os.getpid(), "rewards": list(rewards)}
            program = worker.START.format(module=worker.__name__)
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._socket.setblocking(False)
        self._loaded = False
        self.killed = False

    async def load(self) -> None:
        """Wait until it has imported the functions."""
        if not self._loaded:
            await self._receive(START_S)
            self._loaded = True

    async def ask(self, frame: bytes, answers: int, limit_s: float, values: list[float | None]) -> None:
        """Send a request and add the values of its answers to `values`; each answer may take `limit_s`.

        Raises RewardLostError if one takes longer or the process ends, and what a function has raised.
        """
        for _ in range(answers):
            values += (await self._receive(limit_s, frame))["values"]
            frame = b""

    async def _receive(self, limit_s: float, frame: bytes = b"") -> dict[str, Any]:
        """Send a frame if there is one, and return the next message."""
        try:
            async with asyncio.timeout(None if limit_s == math.inf else limit_s):
                await asyncio.get_running_loop().sock_sendall(self._socket, frame)
                (length,) = LENGTH.unpack(await self._read(LENGTH.size))
                message = from_content(await self._read(length))
        except TimeoutError as error:
            raise RewardLostError(f"did not return within {limit_s:g} s") from error
        except (EOFError, OSError) as error:
            raise RewardLostError(await self._ending()) from error
        if "error" in message:
            raise _as_error(message)
        return message

    async def _read(self, count: int) -> bytes:
        """Return `count` bytes; EOFError if the process closes its end before."""
        content, loop = bytearray(count), asyncio.get_running_loop()
        view = memoryview(content)
        while view:
            received = await loop.sock_recv_into(self._socket, view)
            if not received:
                raise EOFError
            view = view[received:]
        return bytes(content)

    async def _ending(self) -> str:
        """Return how the process has ended."""
        with suppress(subprocess.TimeoutExpired):
            status = await asyncio.to_thread(self.process.wait, 5.0)
            return f"ended its process by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        return "closed the connection of its process"

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process and what it has started in its process group; `reap` comes later."""
        if self.killed:
            return
        self.killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._socket.close()

    def reap(self) -> None:
        """Wait for the end of a process that was killed."""
        self.process.wait()


def _as_error(message: Mapping[str, Any]) -> RewardError:
    error = RewardError(**message["error"])
    if message["traceback"]:
        error.add_note(f"In the process of the reward:\n{message['traceback']}")
    return error
