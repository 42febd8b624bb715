"""Anonymous files in memory: processes of one machine map them, and nothing is left behind when one is killed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

_PARTS_AT_ONCE = 512  # a kernel takes at most 1024


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
        written = os.pwritev(file, left[:_PARTS_AT_ONCE], offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    return offset - begin
