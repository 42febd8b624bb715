"""Files that are complete or absent, also after a crash."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

Write = Callable[[Path], list[Path]]
"""Writes files to a folder that exists, from any thread and without other ranks; returns them."""


def write_whole(path: Path, text: str) -> None:
    """Write or replace a file atomically: a reader finds the old text or the new one."""
    partial = path.with_name(f".{path.name}.partial")
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
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in _files(folder)}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
