"""Processes that end with their parent, cleanup after killed processes, and the end of processes that hang."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from moe_replay.errors import ExitStatus

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0  # where the system cannot report the end of a process


def end_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends, or its process; now if it has.

    parent   process id of the one that started it
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def on_end_of_parent(then: Callable[[], None]) -> threading.Thread:
    """Call `then` when the parent of this process ends, in a separate thread."""
    watch = threading.Thread(target=_wait_for_parent, args=(os.getppid(), then), name="parent watch", daemon=True)
    watch.start()
    return watch


def _wait_for_parent(parent: int, then: Callable[[], None]) -> None:
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):  # not Linux, or it is gone already
        while os.getppid() == parent:
            time.sleep(_POLL_S)
    else:
        if os.getppid() == parent:
            select.select([descriptor], [], [])
        os.close(descriptor)
    then()


_GUARD = """
import os, sys
if not sys.stdin.buffer.readline():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as variables:
                if sys.argv[1].encode() in variables.read().split(bytes(1)):
                    os.kill(int(pid), 9)
        except OSError:
            pass
"""


class OrphanReaper:
    """Kills the processes that have the environment variable `mark` when this process ends, for any reason.

    For processes of other programs, which cannot be made to watch their parent.
    """

    def __init__(self, mark: str) -> None:
        command = [sys.executable, "-S", "-c", _GUARD, mark]
        quiet = subprocess.DEVNULL
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def close(self) -> None:
        """End the guard; the processes run on."""
        self._guard.communicate(b"done\n")  # a line: processes forked in the meantime keep the pipe open


def leave_process_group() -> None:
    """Move this process to its own group, which signals of the terminal do not reach."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


# ---- leftovers ------------------------------------------------------------------------------------------------------

_LIST = "shared-memory"
_SHARED = Path("/dev/shm")
_SHARED_NAME = r"(?:psm_|sem\.mp-)[\w-]+"
_OWNED = re.compile(r"moe-replay-(?P<host>[0-9a-z]+)-(?P<pid>\d+)-(?P<start>\d+)-.*")


@contextmanager
def owned_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a temporary folder that is named after this process, and remove those of processes that are gone."""
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    clear_leftovers(parent)
    prefix = f"moe-replay-{_host()}-{os.getpid()}-{start_time(os.getpid()) or 0}-"
    with tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as folder:
        yield Path(folder)


def clear_leftovers(parent: Path) -> list[Path]:
    """Remove this user's folders of `owned_folder` whose process on this machine is gone; return them.

    The shared-memory files that a folder lists and no process uses go with it.
    """
    folders = [(path, _OWNED.fullmatch(path.name)) for path in parent.glob("moe-replay-*") if _is_own(path)]

    def alive(name: re.Match[str]) -> bool:
        return start_time(int(name["pid"])) == int(name["start"])

    dead = [path for path, name in folders if name is not None and name["host"] == _host() and not alive(name)]
    for path in dead:
        _remove_shared_files(path / _LIST)
        shutil.rmtree(path, ignore_errors=True)  # another process may be removing it too
    return dead


def list_shared_files(folder: Path) -> None:
    """Write the names of the files in shared memory that this process and those below it use to an `owned_folder`.

    A resource tracker of Python removes them, unless it is killed together with everything else.
    """
    names = {name for pid in [os.getpid(), *descendants(os.getpid())] for name in shared_files(pid)}
    (folder / _LIST).write_text("\n".join(sorted(names)), encoding="utf-8")


def shared_files(pid: int) -> set[str]:
    """Return the names in /dev/shm of Python's shared memory and semaphores that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return set(re.findall(rf"{_SHARED}/({_SHARED_NAME})$", maps, re.MULTILINE))


def _remove_shared_files(listed: Path) -> None:
    if not listed.is_file():
        return
    names = set(re.findall(rf"^{_SHARED_NAME}$", listed.read_text(encoding="utf-8", errors="replace"), re.MULTILINE))
    used = {name for path in Path("/proc").glob("[0-9]*") for name in shared_files(int(path.name))} if names else set()
    for name in names - used:
        with suppress(OSError):  # removed already, or of another user
            (_SHARED / name).unlink()


def descendants(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            children += map(int, task.read_text().split())
    return children + [below for child in children for below in descendants(child)]


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid() and not path.is_symlink()
    except OSError:
        return False  # removed by another process


def start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since the system did; None if there is no such process.

    Process ids are reused; the pair of id and start time is not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _host() -> str:
    return re.sub("[^0-9a-z]", "", socket.gethostname().lower()) or "host"


# ---- functions that end the process ---------------------------------------------------------------------------------


@contextmanager
def exits_are_failures() -> Iterator[None]:
    """Have `os._exit(0)` in this block end the process with `ExitStatus.FAILED`, and a line that names the caller.

    A user's function that calls it would end the run as if it had succeeded, and Python has no hook before it. Other
    statuses are kept, and processes that are forked in the block, whose normal end it is.
    """
    own_pid, end_process = os.getpid(), os._exit

    def end(status: int) -> NoReturn:
        if status == ExitStatus.OK and os.getpid() == own_pid:
            caller = sys._getframe(1)
            place = f"{caller.f_code.co_name} in {caller.f_code.co_filename}, line {caller.f_lineno}"
            os.write(_STDERR, f"error: the run was ended by os._exit(0), called by {place}\n".encode())
            status = ExitStatus.FAILED
        end_process(status)

    os._exit = end
    try:
        yield
    finally:
        os._exit = end_process


# ---- functions that hang in C code -----------------------------------------------------------------------------------
# They keep the interpreter's lock: no thread can raise an error, and no signal handler runs. The timer of
# `faulthandler` does not need the lock: it writes the stacks of all threads and ends the process with status 1.

HANG_GRACE_S = 60.0  # beyond the limit after which the waiting thread gives up
_LONGEST_S = 1e7
_STDERR = 2


class HangWatch:
    """One timer for all threads that wait for a user's function: it ends when the last of them should have given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._end = 0.0

    @contextmanager
    def waiting(self, limit_s: float) -> Iterator[None]:
        """End the process if this block takes much longer than `limit_s`, after which the waiting thread gives up."""
        if limit_s == math.inf:
            yield
            return
        with self._lock:
            self._waiting += 1
            now = time.monotonic()
            left = max(min(limit_s + HANG_GRACE_S, _LONGEST_S), self._end - now)
            self._end = now + left
            faulthandler.dump_traceback_later(left, exit=True, file=_STDERR)
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._end = 0.0
                    faulthandler.cancel_dump_traceback_later()


WATCH = HangWatch()
"""Of this process, as the timer of `faulthandler` is."""
