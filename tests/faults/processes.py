"""Processes of a test: what they have started, and waiting until it is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from moe_replay.utils.processes import shared_files, start_time

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  # only ends what hangs


class Process(NamedTuple):
    """A process, told from a later one with the same number."""

    pid: int
    started: int | None

    @property
    def alive(self) -> bool:
        if self.started is None or start_time(self.pid) != self.started:
            return False
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def process(pid: int) -> Process:
    return Process(pid, start_time(pid))


def descendants(pid: int) -> list[Process]:
    """All processes below one, however deep."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found, below = [], [pid]
    while below:
        below = [child for each in below for child in parents.get(each, [])]
        found += [process(child) for child in below]
    return found


def title(pid: int) -> str:
    """The command of a process, and its name: of a fork only that is its own."""
    folder = Path("/proc", str(pid))
    return " ".join((folder / name).read_text(errors="replace").replace("\0", " ") for name in ("cmdline", "comm"))


def wait_until_gone(processes: Iterable[Process]) -> list[Process]:
    """Those that still live when the limit is over: none, or the test fails."""
    left, end = list(processes), time.monotonic() + 120.0
    while left and time.monotonic() < end:
        left = [each for each in left if each.alive]
        time.sleep(0.05)
    return left


def wait_for_line(stream: IO[str], start: str) -> str:
    """Read until a line begins so, spaces aside; a stream that ends before fails the test."""
    seen = []
    for line in stream:
        seen.append(line)
        if " ".join(line.split("\r")[-1].split()).startswith(start):
            return line
    raise AssertionError(f"no line {start!r} in:\n{''.join(seen)}")


def start_python(code: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    """Run a program in a Python of its own, in a process group of its own, with its output as a pipe."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )


def start_command(*words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Run `moe-replay`, in a process group of its own; output and errors are one pipe."""
    return _start(["-m", "moe_replay.cli.main", *words], environment or {})


def start_ranks(*words: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Run `moe-replay` on two ranks of torchrun, as `start_command` does."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return _start([*torchrun, "-m", "moe_replay.cli.main", *words], environment or {})


def _start(words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment,
    )


def rank_process(agent: int, number: int) -> Process | None:
    """A rank that the agent of torchrun has started; None before that. One that was forked has it as its name."""
    for each in descendants(agent):
        folder = Path("/proc", str(each.pid))
        stat, variables = (folder / "stat").read_text(), (folder / "environ").read_text(errors="replace").split("\0")
        known = f"RANK={number}" in variables or f"(rank {number})" in stat
        if int(stat.rpartition(")")[2].split()[1]) == agent and known:
            return each
    return None


def shared_memory(processes: Iterable[Process]) -> set[Path]:
    """Files in shared memory that any of these processes uses."""
    return {Path("/dev/shm", name) for each in processes for name in shared_files(each.pid)}


def named_sockets(processes: Iterable[Process]) -> set[Path]:
    """Files of Unix sockets that any of these processes has open."""
    inodes = set()
    for each in processes:
        with suppress(OSError):  # it has ended
            inodes |= {os.readlink(entry) for entry in os.scandir(f"/proc/{each.pid}/fd")}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = [words for words in lines if len(words) > 7 and words[7].startswith("/")]
    return {Path(words[7]) for words in named if f"socket:[{words[6]}]" in inodes}


def wait_until_removed(files: Iterable[Path]) -> list[Path]:
    """Those that still exist when the limit is over: none, or the test fails."""
    left, end = list(files), time.monotonic() + 120.0
    while left and time.monotonic() < end:
        left = [each for each in left if each.exists()]
        time.sleep(0.05)
    return left
