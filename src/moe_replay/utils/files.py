"""Files that are complete or absent, also after a crash; anonymous files that processes of one machine map."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

Write = Callable[[Path], list[Path]]
"""Writes files to a folder that exists, from any thread and without other ranks; returns them."""


def write_whole(path: Path, text: str) -> None:
    """Write or replace a file atomically: a reader finds the old text or the new one, also if two processes write."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def apply_umask(path: Path) -> None:
    """Give a file the permissions that a plainly opened one gets here; temporary files that were renamed have fewer."""
    probe = path.with_name(f".{path.name}.mode")
    # A file shows what the umask is; reading it directly means setting it, for every thread of the process.
    descriptor = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        mode = os.fstat(descriptor).st_mode & 0o777
    finally:
        os.close(descriptor)
        probe.unlink()
    path.chmod(mode)


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file below a folder, by relative path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


_MAX_PARTS = 512  # a kernel takes at most 1024


def anonymous_file() -> int:
    """Return the descriptor of a new file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("moe-replay")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_at(file: int, offset: int, parts: Sequence[memoryview]) -> int:
    """Write all parts from `offset` on; return their size."""
    left, begin = [part for part in parts if len(part)], offset
    while left:
        written = os.pwritev(file, left[:_MAX_PARTS], offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return offset - begin
